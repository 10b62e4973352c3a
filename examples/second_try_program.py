"""An agent that is a program: it asks the policy for a sum, and once more after a wrong answer.

    stdin    {"messages": [{"role": "user", "content": "12+34="}], "answer": "046", …}
    policy   047
    policy   046          prompted with 12+34=04712+34=
    stdout   {"rewards": {"right": 0.5}}

`configs/grpo_program.yaml` trains on its calls. It uses no package: it could be in any language.
"""

import json
import os
import sys
import urllib.request

DISCOUNT = 0.5  # of an answer after a wrong one


def complete(prompt: str) -> str:
    """The policy's continuation of a text."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/completions",
        data=json.dumps({"model": os.environ["OPENAI_MODEL"], "prompt": prompt}).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def main() -> None:
    task = json.loads(sys.stdin.readline())
    question = prompt = task["messages"][-1]["content"]
    value = 1.0
    for _ in range(2):
        answer = complete(prompt)
        if answer == task["answer"]:
            break
        prompt += answer + question
        value *= DISCOUNT
    else:
        value = 0.0
    sys.stdout.write(json.dumps({"rewards": {"right": value}}) + "\n")


if __name__ == "__main__":
    main()
