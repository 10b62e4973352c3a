"""Supervised fine-tuning: the same policy workers, the answers of the data instead of samples."""

from dataclasses import dataclass

from nemorl.config.algorithm import SftConfig
from nemorl.data.examples import Example
from nemorl.data.order import TaskOrder
from nemorl.observe.observer import Observer
from nemorl.session.session import Session
from nemorl.session.shard import SequencePlace

from .aggregation import sequence_weights
from .bookkeeping import Bookkeeper
from .losses import CrossEntropyLoss, finish_metrics


@dataclass
class SftLoop:
    """Steps over examples in their order."""

    config: SftConfig
    session: Session
    examples: list[Example]
    order: TaskOrder
    position: int  # in the order; the next example
    observer: Observer
    books: Bookkeeper

    async def run(self) -> None:
        """All steps that are left."""
        await self.books.open()
        for step in self.books.steps(self.config.num_steps):
            places = range(self.position, self.position + self.config.batch_size)
            tasks = [self.order.task_index(place) for place in places]
            batch = self._batch([self.examples[task] for task in tasks])
            with self.observer.stage("training"):
                await self.session.learner.load(batch, kind="examples")
                update = await self.session.learner.train(CrossEntropyLoss())
            values = finish_metrics(update.sums, update.maxima) | self.books.optimizer_figures([update])
            values |= self.session.learner.packing_figures()
            self.position = places.stop
            await self.books.finish_step(step, values, self.position)

    def _batch(self, examples: list[Example]) -> list[SequencePlace]:
        """The examples of one step, stored and weighted."""
        store = self.session.store(examples)
        weights = sequence_weights([e.num_learnt for e in examples], self.config.aggregation).tolist()
        return [
            SequencePlace(store, row, example.num_tokens, weight=weight)
            for row, (example, weight) in enumerate(zip(examples, weights, strict=True))
        ]
