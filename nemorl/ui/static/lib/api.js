// Requests to the server. The token comes in the fragment of the first address, which no server sees, and stays
// in this tab.

const KEY = "nemorl-token";

if (location.hash.length > 1) {
  sessionStorage.setItem(KEY, location.hash.slice(1));
  history.replaceState(null, "", location.pathname + location.search);
}

export class ApiError extends Error {
  constructor(status, body) {
    super(body.error || `the server answered with status ${status}`);
    Object.assign(this, { status, place: body.place || "", fix: body.fix || "", body });
  }
}

export const isAbort = (error) => error instanceof DOMException && error.name === "AbortError";

async function send(path, params, options = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params || {})) {
    if (value !== undefined && value !== null) query.set(key, value);
  }
  const address = query.size ? `${path}?${query}` : path;
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}`, ...options.headers };
  let answer;
  try {
    answer = await fetch(address, { ...options, headers });
  } catch (error) {
    if (isAbort(error)) throw error;
    const fix = "start nemorl ui again and open the address that it prints";
    throw new ApiError(0, { error: "the server does not answer", fix });
  }
  if (!answer.ok) {
    let body = {};
    try {
      body = await answer.json();
    } catch {
      // no JSON: the status says it
    }
    throw new ApiError(answer.status, body);
  }
  return answer;
}

export const get = async (path, params, signal) => (await send(path, params, { signal })).json();

export async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return (await send(path, {}, { method: "POST", body: JSON.stringify(body), headers, signal })).json();
}

const KINDS = {
  float64: Float64Array, float32: Float32Array, int32: Int32Array, int64: BigInt64Array, uint8: Uint8Array,
  uint16: Uint16Array, uint32: Uint32Array, int8: Int8Array, int16: Int16Array, bool: Uint8Array,
};

// {facts, arrays: {name: typed array}} of a body as nemorl/ui/answers.py writes it.
export async function arrays(path, params, signal) {
  return unpack(await (await send(path, params, { signal })).arrayBuffer());
}

export function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const start = Math.ceil((4 + length) / 8) * 8;
  const found = {};
  for (const [name, { dtype, shape, offset }] of Object.entries(header.arrays)) {
    const count = shape.reduce((a, b) => a * b, 1);
    found[name] = new KINDS[dtype](buffer, start + offset, count);
  }
  return { facts: header.facts, arrays: found };
}

export async function text(path, params, signal) {
  return (await send(path, params, { signal })).text();
}

// Calls `onMessage` with the JSON of each server-sent event until the function that it returns is called. A
// connection that breaks is made again; `onProblem` is told of it, and with null that it works again.
export function follow(path, params, onMessage, onProblem = () => {}) {
  const control = new AbortController();
  const run = async () => {
    let wait = 500;
    while (!control.signal.aborted) {
      try {
        const answer = await send(path, params, { signal: control.signal });
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        onProblem(null);
        wait = 500;
        for (;;) {
          const { done, value } = await reader.read();
          if (done) break;
          const events = (rest + value).split("\n\n");
          rest = events.pop();
          for (const event of events) {
            const data = event.split("\n").filter((line) => line.startsWith("data: "));
            if (data.length) onMessage(JSON.parse(data.map((line) => line.slice(6)).join("\n")));
          }
        }
      } catch (error) {
        if (control.signal.aborted) return;
        onProblem(error);
        if (error.status >= 400 && error.status < 500) return;
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(2 * wait, 10000);
    }
  };
  run();
  return () => control.abort();
}
