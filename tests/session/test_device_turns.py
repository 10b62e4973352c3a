"""Who has devices that several groups share."""

import asyncio

from nemorl.session.handles import DeviceScheduler


class Group:
    """Leaves and returns, and reports it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.there = name, log, True

    async def offload(self) -> None:
        if self.there:
            await asyncio.sleep(0)
            self.log.append(f"{self.name} leaves")
            self.there = False

    async def reload(self) -> None:
        if not self.there:
            await asyncio.sleep(0)
            self.log.append(f"{self.name} settles")
            self.there = True


def test_others_leave_before_one_settles() -> None:
    log: list[str] = []
    policy, critic = Group("policy", log), Group("critic", log)
    turns = DeviceScheduler([policy, critic])

    async def steps() -> None:
        await turns.give_to(policy)
        await turns.give_to(None)  # generation
        await turns.give_to(critic)
        await asyncio.gather(turns.give_to(policy), turns.give_to(critic))

    asyncio.run(steps())
    assert log == [
        "critic leaves",
        "policy leaves",
        "critic settles",
        "critic leaves",
        "policy settles",
        "policy leaves",
        "critic settles",
    ]


def test_a_reward_model_answers_in_generations_turn_and_keeps_it_until_then() -> None:
    log: list[str] = []
    policy, taste = Group("policy", log), Group("taste", log)
    turns = DeviceScheduler([policy])
    turns.tenants.append(taste)

    async def score(number: int) -> None:
        async with turns.borrow_during_generation(taste):
            log.append(f"score {number} begins")
            await asyncio.sleep(0)
            log.append(f"score {number} ends")

    async def steps() -> None:
        await turns.give_to(policy)
        early = asyncio.create_task(score(1))  # asked for by a client that went away in the step before
        await asyncio.sleep(0)
        log.append("training")
        await turns.give_to(None)
        await early
        late = asyncio.create_task(score(2))
        await asyncio.sleep(0)
        await turns.give_to(policy)
        await late

    asyncio.run(asyncio.wait_for(steps(), 60))
    scored = ["taste settles", "score 1 begins", "score 1 ends"]
    again = ["score 2 begins", "score 2 ends", "taste leaves", "policy settles"]
    assert log == ["taste leaves", "training", "policy leaves", *scored, *again]
