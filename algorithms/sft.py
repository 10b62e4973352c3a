"""Supervised fine-tuning: the same policy workers, the answers of the data instead of samples."""

from dataclasses import dataclass

from nemorl.config.algorithm import SftConfig
from nemorl.data.order import TaskOrder
from nemorl.data.sft import SftExample
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
    examples: list[SftExample]
    order: TaskOrder
    observer: Observer
    books: Bookkeeper

    async def run(self) -> None:
        """All steps that are left."""
        await self.books.open()
        store = self.session.store(self.examples)
        for step in self.books.steps(self.config.num_steps):
            first = (step - 1) * self.config.batch_size
            rows = [self.order.task_index(first + i) for i in range(self.config.batch_size)]
            learnt = [self.examples[row].num_learnt for row in rows]
            weights = sequence_weights(learnt, self.config.aggregation).tolist()
            batch = [
                SequencePlace(store, row, self.examples[row].num_tokens, weight=weight)
                for row, weight in zip(rows, weights, strict=True)
            ]
            with self.observer.stage("training"):
                await self.session.learner.load(batch, kind="examples")
                update = await self.session.learner.train(CrossEntropyLoss())
            values = finish_metrics(update.sums, update.maxima) | self.books.optimizer_figures([update])
            await self.books.finish_step(step, values, first + self.config.batch_size)
