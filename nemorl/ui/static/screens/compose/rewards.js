// Rewards: weights by sliders, built-in and own functions, and a preview on answers that exist.

import { html, useEffect, useMemo, useState } from "../../lib/preact.js";
import { get, post } from "../../lib/api.js";
import { Histogram } from "../../lib/chart.js";
import { change, view } from "../../lib/view.js";
import { Editor } from "../../lib/editor.js";
import { Problem, Tabs, number, percent, seconds } from "../../lib/widgets.js";

const BINS = 20;
const MAX_SHOWN = 100;
const MAX_WEIGHT = 2; // of sliders; larger weights are typed
const valueOf = (node, field) => node.fields.find((one) => one.name === field)?.value;
const nameOf = (node) => String(valueOf(node, "name") || valueOf(node, "function") || node.chosen || "").replace(/^.*:/, "");
const weightOf = (node) => Number(valueOf(node, "weight") ?? 1);

// The values of a reward that its scores depend on.
const withoutWeight = ({ name, value, chosen, fields = [], items = [] }) => [name, value, chosen, [...fields, ...items].filter((node) => node.name !== "weight").map(withoutWeight)];

function Weight({ node, weight, onWeigh, onEdit }) {
  const name = nameOf(node);
  const commit = (event) => onEdit([{ path: [...node.path, "weight"], value: Number(event.target.value) }]);
  const most = Math.max(MAX_WEIGHT, Math.abs(weight));
  const rename = (event) => {
    const given = event.target.value.trim();
    const path = [...node.path, "name"];
    onEdit([given ? { path, value: given } : { path, remove: true }]);
  };
  return html`<div class="weight">
    <input class="title" value=${name} spellcheck="false" aria-label=${`Name of ${name}`} title="Its name in metrics and filters; empty: that of the function or kind" onChange=${rename} />
    <span class="muted">${node.chosen}</span>
    <input
      type="range" min=${-most} max=${most} step="0.05" value=${weight}
      aria-label=${`Weight of ${name}`}
      onInput=${(event) => onWeigh(name, Number(event.target.value))}
      onChange=${commit}
    />
    <input class="short" type="number" step="any" value=${weight} aria-label=${`Weight of ${name} as a number`} onInput=${(event) => event.target.value !== "" && onWeigh(name, Number(event.target.value))} onChange=${commit} />
    <button class="quiet reset" aria-label=${`Remove ${name}`} title="Remove this reward" onClick=${() => onEdit([{ path: node.path, remove: true }])}>×</button>
  </div>`;
}

// A built-in function, or another kind of reward, whose fields are then filled in in the form.
function AddReward({ facts, variants, onEdit }) {
  const [name, setName] = useState("exact_match");
  const kinds = variants.filter((one) => one.name !== "function");
  const kind = kinds.find((one) => one.name === name);
  const add = () => {
    onEdit([{ path: ["rewards"], value: kind ? { kind: name } : { function: name }, append: true }]);
    if (kind) change({ tab: null, find: "rewards" });
  };
  const option = (one) => html`<option key=${one} value=${one}>${one}</option>`;
  return html`<div class="row">
    <select aria-label="Reward to add" value=${name} onChange=${(event) => setName(event.target.value)}>
      <optgroup label="Built-in functions">${Object.keys(facts.rewards).map(option)}</optgroup>
      <optgroup label="Other kinds">${kinds.map((one) => option(one.name))}</optgroup>
    </select>
    <button onClick=${add}>Add</button>
    <span class="muted">${kind ? kind.help : facts.rewards[name]}</span>
  </div>`;
}

// An editor with the signature pre-filled, saved as a file of the user's.
function OwnReward({ facts, onEdit, onSaved }) {
  const [file, setFile] = useState("my_rewards.py");
  const [signature, setSignature] = useState("trl");
  const [text, setText] = useState("");
  const [version, setVersion] = useState(null);
  const [error, setError] = useState(null);
  const [said, setSaid] = useState("");
  const template = async (form) => {
    setSignature(form);
    setText((await get("/api/compose/template", { signature: form, function: "my_reward" })).text);
  };
  const open = async () => {
    try {
      const found = await get("/api/compose/file", { file });
      setText(found.text);
      setVersion(found.version);
      setSaid(`${file} is open.`);
      setError(null);
    } catch (problem) {
      setError(problem);
    }
  };
  useEffect(() => void template("trl"), []);
  const save = async () => {
    try {
      const saved = await post("/api/compose/reward", { file, text, version });
      setVersion(saved.version);
      setError(null);
      onSaved();
      const edits = saved.functions.map((name) => ({ path: ["rewards"], value: { function: name }, append: true }));
      setSaid(`Saved. Functions: ${saved.functions.join(", ")}`);
      return edits;
    } catch (problem) {
      setError(problem);
      return [];
    }
  };
  const wrong = error && /:(\d+)$/.exec(error.place || "");
  const marks = useMemo(() => (wrong ? [{ line: Number(wrong[1]), message: error.message }] : []), [error]);
  return html`<details class="panel">
    <summary><b>Own function</b> <span class="muted">in a Python file below this folder</span></summary>
    <div class="row">
      <label>File <input value=${file} spellcheck="false" onInput=${(event) => { setFile(event.target.value); setVersion(null); }} /></label>
      <button onClick=${open}>Open</button>
      <label>Signature <select value=${signature} onChange=${(event) => template(event.target.value)}>
        ${Object.entries(facts.signatures).map(([name, form]) => html`<option value=${name}>${name} ${form}</option>`)}
      </select></label>
    </div>
    <div class="python"><${Editor} value=${text} onChange=${setText} language="python" marks=${marks} label="Reward function" /></div>
    <div class="row">
      <button onClick=${save}>Save file</button>
      <button onClick=${async () => { const edits = await save(); if (edits.length) onEdit(edits.slice(-1)); }}>Save and add the last function</button>
      <span class="muted" role="status">${said}</span>
    </div>
    <${Problem} error=${error} />
  </details>`;
}

const histogram = (values) => {
  const known = values.filter((value) => value !== null);
  if (!known.length) return [];
  let [low, high] = [Math.min(...known), Math.max(...known)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const bins = Array.from({ length: BINS }, (_, at) => ({
    low: low + ((high - low) * at) / BINS, high: low + ((high - low) * (at + 1)) / BINS, count: 0,
  }));
  for (const value of known) bins[Math.min(BINS - 1, Math.floor(((value - low) / (high - low)) * BINS))].count += 1;
  return bins;
};

// Sums with other weights, and the groups whose sums are all equal.
export function weighed(scored, weights) {
  const totals = scored.answers.map((_, row) => {
    if (scored.parts.some((part) => part.errors?.[row])) return null;
    return scored.parts.reduce((sum, part) => sum + (part.values[row] ?? 0) * (weights[part.name] ?? part.weight), 0);
  });
  const groups = new Map();
  totals.forEach((total, row) => {
    if (total === null) return;
    const { group } = scored.answers[row];
    groups.set(group, [...(groups.get(group) || []), total]);
  });
  const several = [...groups.values()].filter((group) => group.length > 1);
  const equal = several.filter((group) => Math.max(...group) - Math.min(...group) < 1e-12).length;
  return { totals, groups: several.length, equal };
}

const stats = (values) => {
  const known = values.filter((value) => value !== null);
  if (!known.length) return ["", "", "", ""];
  const mean = known.reduce((a, b) => a + b, 0) / known.length;
  const std = Math.sqrt(known.reduce((a, b) => a + (b - mean) ** 2, 0) / known.length);
  return [mean, std, Math.min(...known), Math.max(...known)].map((value) => number(value, 3));
};

// What is known of groups whose answers have all the same sum, which train nothing.
export function spread(scored, groups, equal) {
  const whole = "runs with logger.trajectories: sampled or all record whole groups";
  const part = `samples.jsonl has some of the answers of each group, and ${whole}`;
  if (!groups) return `the share of groups without spread is unknown: ${scored.is_partial ? part : "no prompt has several answers"}`;
  const share = `${equal} of ${groups} groups (${percent(equal / groups)}) without spread`;
  return scored.is_partial ? `${share} among these answers; of whole groups the share is unknown: ${part}` : `${share}${equal ? ": they train nothing" : ""}`;
}

function Scored({ scored, weights }) {
  const { totals, groups, equal } = useMemo(() => weighed(scored, weights), [scored, weights]);
  const failed = scored.parts.filter((part) => part.errors?.some(Boolean));
  const row = (name, weight, values, part) => html`<tr>
    <td>${name}</td><td class="right">${weight}</td>
    ${stats(values).map((text) => html`<td class="right">${text}</td>`)}
    <td class=${part?.errors?.some(Boolean) ? "bad right" : "right"}>${part?.errors?.filter(Boolean).length || ""}</td>
    <td class="right">${part ? seconds(part.seconds) : ""}</td>
    <td class="bins"><${Histogram} bins=${histogram(values)} height=${28} label=${`Values of ${name}`} /></td>
    <td class="muted">${part?.note || ""}</td>
  </tr>`;
  return html`<div class="column">
    ${scored.problems.map((text) => html`<p class="notice">${text}</p>`)}
    <div class="scroll"><table class="table" aria-label="Rewards by part">
      <thead><tr>${["reward", "weight", "mean", "std", "min", "max", "errors", "seconds", "values", ""].map((title) => html`<th>${title}</th>`)}</tr></thead>
      <tbody>
        ${scored.parts.map((part) => row(part.name, number(weights[part.name] ?? part.weight, 3), part.values, part))}
        ${row(html`<b>sum</b>`, "", totals)}
      </tbody>
    </table></div>
    <p role="status" class=${groups && !scored.is_partial && equal / groups >= 0.5 ? "notice" : ""}>${scored.answers.length} answers of ${scored.source}; ${spread(scored, groups, equal)}.</p>
    ${failed.map((part) => html`<div class="problem" role="alert">
      <b>${part.errors.find(Boolean)}</b>
      ${part.traceback && html`<pre>${part.traceback}</pre>`}
    </div>`)}
    <details><summary>Answers</summary>
      <div class="scroll"><table class="table answers" aria-label="Answers">
        <thead><tr><th>prompt</th><th>answer</th><th>expected</th>${scored.parts.map((part) => html`<th class="right">${part.name}</th>`)}<th class="right">sum</th></tr></thead>
        <tbody>${scored.answers.slice(0, MAX_SHOWN).map((one, at) => html`<tr>
          <td><pre>${one.prompt}</pre></td><td><pre>${one.completion}</pre></td><td><pre>${one.answer ?? ""}</pre></td>
          ${scored.parts.map((part) => html`<td class="right" title=${part.errors?.[at] || ""}>${part.errors?.[at] ? "error" : number(part.values[at], 3)}</td>`)}
          <td class="right"><b>${number(totals[at], 3)}</b></td>
        </tr>`)}</tbody>
      </table></div>
    </details>
  </div>`;
}

// `kinds` changes when the rewards do, but for their weights, or a file of functions.
function Preview({ text, file, weights, kinds }) {
  const { params } = view.value;
  const { answers: source = "typed", lines = "" } = params;
  const [runs, setRuns] = useState([]);
  const run = params.of || runs[0]?.name || "";
  const [typed, setTyped] = useState({ prompt: "12+34=", completions: "46\n45", answer: "46" });
  const [scored, setScored] = useState(null); // with `of`, the answers and rewards that it is of
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    get("/api/runs/list").then(setRuns, () => {});
  }, []);
  const answers = {
    run: { run },
    file: { lines },
    typed: { answers: JSON.stringify({ prompt: typed.prompt, completions: typed.completions.split("\n"), answer: typed.answer || null }) },
  }[source];
  const of = JSON.stringify([answers, kinds]);
  const score = async () => {
    setBusy(true);
    try {
      setScored({ ...(await post("/api/compose/score", { text, file, ...answers })), of });
      setError(null);
    } catch (problem) {
      setError(problem);
      setScored(null);
    }
    setBusy(false);
  };
  const set = (name) => (event) => setTyped({ ...typed, [name]: event.target.value });
  return html`<section class="panel column" aria-label="Preview">
    <h2>Preview</h2>
    <${Tabs} of=${{ typed: "Typed", run: "Answers of a run", file: "File of JSON lines" }} at=${source} onChange=${(next) => change({ answers: next === "typed" ? null : next })} label="Answers to score" />
    ${source === "typed" && html`<div class="typed">
      <label>Prompt<textarea rows="2" value=${typed.prompt} onInput=${set("prompt")}></textarea></label>
      <label>Answers, one a line<textarea rows="2" value=${typed.completions} onInput=${set("completions")}></textarea></label>
      <label>Expected<textarea rows="2" value=${typed.answer} onInput=${set("answer")}></textarea></label>
    </div>`}
    ${source === "run" && html`<label>Run <select value=${run} onChange=${(event) => change({ of: event.target.value })}>
      ${runs.length ? runs.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}</option>`) : html`<option key="" value="">no run here yet</option>`}
    </select></label>`}
    ${source === "file" && html`<label>File <input value=${lines} placeholder="answers.jsonl" spellcheck="false" onInput=${(event) => change({ lines: event.target.value })} />
      <span class="muted"> objects with prompt, completion or completions, answer, and columns</span></label>`}
    <div class="row"><button class="primary" disabled=${busy || (source === "run" && !run)} onClick=${score}>${busy ? "Scoring…" : "Score"}</button>
      <span class="muted">Functions run in a process of their own, at most a minute.</span></div>
    <${Problem} error=${error} />
    ${scored && (busy || scored.of !== of) && html`<p class="notice" role="status">${busy ? "Scoring: what follows is the result of before." : "Answers or rewards have changed: what follows is the result of before. Score again."}</p>`}
    ${scored && html`<div class=${busy || scored.of !== of ? "outdated" : ""}><${Scored} scored=${scored} weights=${weights} /></div>`}
  </section>`;
}

export function Rewards({ node, facts, text, file, round, onEdit, onSaved, readOnly }) {
  const [moved, setMoved] = useState({});
  useEffect(() => setMoved({}), [node]);
  const items = node?.items || [];
  const weights = useMemo(() => ({ ...Object.fromEntries(items.map((item) => [nameOf(item), weightOf(item)])), ...moved }), [items, moved]);
  const kinds = useMemo(() => JSON.stringify([round, items.map(withoutWeight)]), [items, round]);
  if (!node) return html`<p class="empty muted">The form waits until the text is right.</p>`;
  return html`<div class="column">
    ${node.unused && html`<p class="notice">${node.unused}: rewards have no use.</p>`}
    ${items.map((item) => html`<${Weight} key=${item.path.join(".")} node=${item} weight=${weights[nameOf(item)]} onEdit=${onEdit}
      onWeigh=${(name, value) => setMoved({ ...moved, [name]: value })} />`)}
    ${!items.length && html`<p class="muted">No reward yet: the environment's own alone counts.</p>`}
    <${AddReward} facts=${facts} variants=${node.variants} onEdit=${onEdit} />
    ${!readOnly && html`<${OwnReward} facts=${facts} onEdit=${onEdit} onSaved=${onSaved} />`}
    <${Preview} text=${text} file=${file} weights=${weights} kinds=${kinds} />
  </div>`;
}
