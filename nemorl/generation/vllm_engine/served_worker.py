"""Extension of vLLM's worker class for servers that receive weights from a run; see `served`.

vLLM imports it in every worker before the model is loaded (`--worker-extension-cls`).
"""

import json
import os
from typing import Any

from nemorl.config.generation import Update

from .arguments import LEARNED_LAYOUT

os.environ[LEARNED_LAYOUT] = "1"  # which the next import reads

from .host import LAYOUT
from .worker import VllmWorkerExtension, make_receiver, receive_in_thread


class ServedWorker(VllmWorkerExtension):
    def nemorl_describe(self: Any, update: Update) -> str:
        """Get ready for updates of a run, which begin with a version of all weights."""
        make_receiver(self, update, None)
        layout = LAYOUT.dump_python(self.nemorl.describe(), mode="json")
        return json.dumps({"layout": layout, "logprobs": self.model_runner.model_config.logprobs_mode})

    def nemorl_begin(self: Any, session: str) -> None:
        """Begin to receive; `nemorl_report` has what came of it."""
        self.nemorl_answer = None

        def keep(answer: str) -> None:
            self.nemorl_answer = answer

        receive_in_thread(self, session, keep)

    def nemorl_report(self: Any) -> str | None:
        """The report or the error, as JSON; None until there is one."""
        return self.nemorl_answer  # type: ignore[no-any-return]
