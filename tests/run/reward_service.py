"""A reward service in its own process: `python -m tests.run.reward_service PORT`.

The score of an answer is the share of its characters that are digits.
"""

import sys

from aiohttp import web


def score(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


async def rewards(request: web.Request) -> web.Response:
    said = [one["completion"][-1]["content"] for one in (await request.json())["conversations"]]
    return web.json_response({"data": [{"index": i, "reward": score(text)} for i, text in enumerate(said)]})


if __name__ == "__main__":
    app = web.Application()
    app.add_routes([web.post("/v1/rewards", rewards)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
