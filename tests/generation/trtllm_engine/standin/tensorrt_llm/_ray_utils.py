"""The decorator of worker methods that require the engine to be still."""

import functools


def control_action_decorator(func=None, *, drain=True):
    def decorate(wrapped):
        @functools.wraps(wrapped)
        def with_engine_held(self, *args, **kwargs):
            with self.engine.control_action(drain=drain):
                return wrapped(self, *args, **kwargs)

        return with_engine_held

    return decorate if func is None else decorate(func)
