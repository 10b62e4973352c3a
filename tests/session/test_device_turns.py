"""Who has devices that several groups share."""

import asyncio

from nemorl.session.device_turns import DeviceTurns


class Group:
    """Leaves and returns, and tells of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.there = name, log, True

    async def leave(self) -> None:
        if self.there:
            await asyncio.sleep(0)
            self.log.append(f"{self.name} leaves")
            self.there = False

    async def settle(self) -> None:
        if not self.there:
            await asyncio.sleep(0)
            self.log.append(f"{self.name} settles")
            self.there = True


def test_others_leave_before_one_settles() -> None:
    log: list[str] = []
    policy, critic = Group("policy", log), Group("critic", log)
    turns = DeviceTurns([policy, critic])

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
