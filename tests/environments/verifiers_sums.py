"""A task set of verifiers, with an agent that asks twice in this process."""

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumsConfig(vf.TasksetConfig):
    number: int = 4


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for left in range(self.config.number):
            data = SumData(prompt=f"{left}+1?", system_prompt="Sums.", answer=str(left + 1))
            yield SumTask(data, self.config.task)


class TwiceConfig(vf.HarnessConfig):
    pass


class Twice(vf.Harness[TwiceConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = answer.choices[0].message.content
                if said == "raise":
                    raise RuntimeError("the agent fell over")
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Sums", "Twice"]
