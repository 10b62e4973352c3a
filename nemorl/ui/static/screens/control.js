// Buttons that stop and resume a run. Starting is part of Compose.

import { html, useEffect, useState } from "../lib/preact.js";
import { post } from "../lib/api.js";
import { Problem } from "../lib/widgets.js";
import { server } from "../lib/server.js";

const ENDED = new Set(["stopped", "failed", "killed"]);
export const LIVING = new Set(["starting", "running", "suspended"]);

export function Control({ head }) {
  const { run, state } = head;
  const [busy, setBusy] = useState("");
  const [asked, setAsked] = useState(false); // a first stop was sent
  const [error, setError] = useState(null);
  const [id, setId] = useState(() => crypto.randomUUID());
  useEffect(() => {
    setAsked(false);
    setBusy("");
    setId(crypto.randomUUID());
  }, [run, LIVING.has(state)]);
  const send = async (what, body, words) => {
    setBusy(words);
    setError(null);
    try {
      await post(`/api/control/${what}`, { run, ...body });
    } catch (problem) {
      setError(problem);
      setId(crypto.randomUUID());
      setBusy("");
      return false;
    }
    if (what !== "resume") setBusy("");
    return true;
  };
  const stop = async () => {
    if (await send("stop", {}, "sending")) setAsked(true);
  };
  const stopNow = () => {
    const question = `End ${run} now? What it did since its last checkpoint is lost.`;
    if (confirm(question)) send("stop", {}, "ending");
  };
  if (!server.value || server.value.read_only) return null;
  const away = LIVING.has(state) && !head.is_here;
  return html`<div class="control row">
    ${busy && html`<span class="muted" role="status">${busy}…</span>`}
    ${asked && !busy && html`<span class="muted" role="status">it saves its last step and ends</span>`}
    ${away && head.is_job && html`<button class="danger" disabled=${Boolean(busy)} onClick=${() => send("cancel", {}, "cancelling the job")}>Cancel job</button>`}
    ${away && !head.is_job && html`<span class="muted">runs on ${head.host}: stop it there</span>`}
    ${LIVING.has(state) && head.is_here && !asked && html`<button disabled=${Boolean(busy)} onClick=${stop}>Stop</button>`}
    ${LIVING.has(state) && head.is_here && asked && html`<button class="danger" disabled=${Boolean(busy)} onClick=${stopNow}>Stop now</button>`}
    ${ENDED.has(state) && html`<button class="primary" disabled=${Boolean(busy)} onClick=${() => send("resume", { id }, "starting")}>Resume</button>`}
    <${Problem} error=${error} />
  </div>`;
}
