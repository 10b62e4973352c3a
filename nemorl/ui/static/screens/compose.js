// Compose an experiment: forms on the left, its YAML on the right, checked at each pause in typing. The file is the
// only state: a form changes lines of the text, and the text makes the form.

import { html, useEffect, useMemo, useRef, useState } from "../lib/preact.js";
import { get, isAbort, post } from "../lib/api.js";
import { Editor } from "../lib/editor.js";
import { address, change, go, view } from "../lib/view.js";
import { Empty, Loading, Problem, Tabs, seconds, useLoaded } from "../lib/widgets.js";
import { Form, makeFilter } from "./compose/form.js";
import { Layouts, Picture } from "./compose/plan.js";
import { Rewards } from "./compose/rewards.js";

const PAUSE = 200; // milliseconds without a change before a check
const TABS = { form: "Form", plan: "Devices", rewards: "Rewards" };
const KEY = "nemorl-compose"; // unsaved text of this tab, so that a reload keeps it

function keep(file, draft) {
  try {
    sessionStorage.setItem(`${KEY}:${file}`, JSON.stringify(draft));
  } catch {
    // no room: the text is not kept over a reload
  }
}

const kept = (file) => JSON.parse(sessionStorage.getItem(`${KEY}:${file}`) || "null");

function Start({ facts, files, error }) {
  const { find = "" } = view.value.params;
  const words = find.toLowerCase().split(/\s+/);
  const has = (text) => words.every((word) => text.toLowerCase().includes(word));
  const first = (one) => (one.name.startsWith("quickstart/") ? 0 : one.name.startsWith("recipes/") ? 2 : 1);
  const recipes = [...facts.recipes].sort((a, b) => first(a) - first(b)).filter((one) => has(`${one.name} ${one.algorithm} ${one.model} ${one.devices} ${one.description}`));
  const own = files.filter(has);
  const recipe = ({ name }) => ({ recipe: name, file: `${name.split("/").at(-1)}.yaml` });
  const open = (params) => (event) => {
    event.preventDefault();
    go("compose", params);
  };
  return html`<main>
    <div class="row"><h1>Compose</h1>
      <label><span class="muted">Find </span><input type="search" value=${find} onInput=${(event) => change({ find: event.target.value })} /></label>
      <span class="grow"></span><button onClick=${open({ file: "experiment.yaml", new: 1 })}>Empty experiment</button></div>
    <${Problem} error=${error} />
    <div class="start">
      <section class="panel"><h2>Experiments here</h2>
        ${own.length ? html`<ul>${own.map((name) => html`<li><a href=${`/compose?file=${encodeURIComponent(name)}`} onClick=${open({ file: name })}>${name}</a></li>`)}</ul>` : html`<${Empty}>No experiment file in this folder: start with a recipe.<//>`}
      </section>
      <section class="panel"><h2>Recipes</h2>
        <div class="scroll"><table class="table" aria-label="Recipes"><thead><tr><th>name</th><th>algorithm</th><th>model</th><th>devices</th></tr></thead>
          <tbody>${recipes.map((one) => html`<tr>
            <td><a href=${address("compose", recipe(one))} onClick=${open(recipe(one))}>${one.name}</a>
              <div class="muted">${one.description}</div></td>
            <td>${one.algorithm}</td><td>${one.model}</td><td>${one.devices}</td></tr>`)}</tbody>
        </table></div>
      </section>
    </div>
  </main>`;
}

// [check, problem, busy] of a text, after a pause; the last good form stays while a text is broken.
function useCheck(text, file, preset, round) {
  const [state, setState] = useState([null, null, false]);
  const form = useRef(null);
  useEffect(() => {
    if (text === null) return undefined;
    const control = new AbortController();
    const timer = setTimeout(async () => {
      setState(([check, error]) => [check, error, true]);
      try {
        let check;
        do {
          check = await post("/api/compose/check", { text, file, preset }, control.signal);
        } while (check.superseded && !control.signal.aborted); // by a request that the page has dropped
        if (control.signal.aborted) return;
        if (check.form) form.current = check.form;
        setState([{ ...check, form: check.form || form.current, text }, null, false]);
      } catch (error) {
        if (!isAbort(error)) setState(([check]) => [check, error, false]);
      }
    }, PAUSE);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [text, file, preset, round]);
  return state;
}

function Conflict({ conflict, text, onTake, onKeep }) {
  return html`<div class="problem" role="alertdialog" aria-label="The file changed on disk">
    <b>${conflict.message}</b><div>${conflict.fix}</div>
    <div class="conflict"><section><h3>On disk</h3><pre tabindex="0">${conflict.body.text}</pre><button onClick=${onTake}>Take this</button></section>
      <section><h3>Here</h3><pre tabindex="0">${text}</pre><button class="danger" onClick=${onKeep}>Overwrite with this</button></section></div>
  </div>`;
}

function Command({ command, title, words }) {
  const [copied, setCopied] = useState(false);
  const copy = () => navigator.clipboard.writeText(command).then(() => {
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  });
  return html`<button class="command" title=${`${title}: ${command}`} onClick=${copy}><code>${command}</code> <span class="muted">${copied ? "copied" : "copy"}</span><span class="short-title">${copied ? "Copied" : words}</span></button>`;
}

function Problems({ report, occupied, onLine }) {
  const remarks = occupied ? [occupied, ...report.remarks] : report.remarks;
  const all = [...report.problems.map((one) => ["bad", one]), ...remarks.map((one) => ["warn", one]), ...report.unverified.map((one) => ["muted", one])];
  if (!all.length) return null;
  return html`<ul class="problems" aria-label="Problems">
    ${all.map(([color, one]) => html`<li>
      ${one.line ? html`<button class="quiet" onClick=${() => onLine(one.line)}>line ${one.line}</button>` : html`<span class="muted">${one.origin || "file"}</span>`}
      <div><b class=${color}>${one.field || "the file"}</b> ${one.fix}${color === "muted" ? " (not verified here)" : ""}</div></li>`)}
  </ul>`;
}

function Composer({ facts, readOnly }) {
  const { params } = view.value;
  const { file = "experiment.yaml", recipe, preset = "here", level = "simple", find = "", tab = "form" } = params;
  const isNew = Boolean(recipe || params.new);
  const [text, setText] = useState(null);
  const [version, setVersion] = useState(null);
  const [saved, setSaved] = useState(null); // the text on disk
  const [name, setName] = useState(file);
  const [taken, setTaken] = useState(""); // the name of a file that was there when this one was begun
  const [error, setError] = useState(null);
  const [conflict, setConflict] = useState(null);
  const [line, setLine] = useState(null);
  const [busy, setBusy] = useState("");
  const [round, setRound] = useState(0); // of checks: files of functions that were saved
  const latest = useRef("");
  const queue = useRef(Promise.resolve());
  const put = (changed) => {
    latest.current = changed;
    setText(changed);
  };

  useEffect(() => {
    let ended = false;
    const load = async () => {
      const draft = kept(`${file}|${recipe || ""}`);
      if (draft) return draft;
      if (isNew) {
        const begun = await get("/api/compose/recipe", { name: recipe, file });
        return { text: begun.text, version: null, saved: null, name: begun.file, taken: begun.file === file ? "" : file };
      }
      const found = await get("/api/compose/file", { file });
      return { text: found.text, version: found.version, saved: found.text };
    };
    put(null);
    setError(null);
    setConflict(null);
    load().then((found) => {
      if (ended) return;
      put(found.text);
      setName(found.name || file);
      setTaken(found.taken || "");
      setVersion(found.version);
      setSaved(found.saved);
    }, (problem) => ended || setError(problem));
    return () => {
      ended = true;
    };
  }, [file, recipe]);
  useEffect(() => {
    if (text !== null) keep(`${file}|${recipe || ""}`, { text, version, saved, name, taken });
  }, [text, version, saved, name, taken]);

  const [check, failure, checking] = useCheck(text, name, preset, round);
  const problems = useMemo(() => {
    const found = new Map();
    const remarks = check?.occupied ? [{ ...check.occupied, isRemark: true }] : [];
    for (const one of [...(check?.report.problems || []), ...remarks]) found.set(one.field, [...(found.get(one.field) || []), one]);
    return found;
  }, [check]);
  const marks = useMemo(() => {
    const mark = (severity) => ({ line, field, fix }) => ({ line, severity, message: `${field ? `${field}: ` : ""}${fix}` });
    return [...(check?.report.problems || []).map(mark("error")), ...(check?.occupied ? [check.occupied] : []).map(mark("warning"))].filter((one) => one.line);
  }, [check]);
  const filter = useMemo(() => makeFilter({ levels: facts.levels, level, find, problems }), [level, find, problems]);
  const broken = check?.broken && check.text === text;
  const isSaved = text === saved && name === file && !isNew;

  // After saving, and after taking the text of the disk: the address names the file.
  const settle = (onDisk) => {
    setVersion(onDisk.version);
    setSaved(onDisk.text);
    setTaken("");
    setConflict(null);
    setError(null);
    if (name === file && !isNew) return;
    keep(`${name}|`, { text: latest.current, version: onDisk.version, saved: onDisk.text });
    sessionStorage.removeItem(`${KEY}:${file}|${recipe || ""}`);
    change({ file: name, recipe: null, new: null });
  };
  // Edits run in sequence, each on the text that the one before has made.
  const edit = (edits) => {
    queue.current = queue.current.then(async () => {
      try {
        for (;;) {
          const before = latest.current;
          const changed = await post("/api/compose/edit", { text: before, file: name, edits });
          if (latest.current !== before) continue; // typed meanwhile
          put(changed.text);
          break;
        }
        setError(null);
      } catch (problem) {
        setError(problem);
      }
    });
  };
  const save = async (over = version) => {
    try {
      settle(await post("/api/compose/save", { file: name, text, version: over }));
      return true;
    } catch (problem) {
      if (problem.status === 409 && problem.body.text !== undefined) setConflict(problem);
      else setError(problem);
      return false;
    }
  };
  const start = async () => {
    setBusy("starting");
    if (isSaved || (await save())) {
      try {
        const { run } = await post("/api/control/start", { file: name, id: crypto.randomUUID() });
        go("watch", { run });
      } catch (problem) {
        setError(problem);
      }
    }
    setBusy("");
  };
  const take = () => {
    put(conflict.body.text);
    settle(conflict.body);
  };
  const goto = (number) => setLine({ line: number });

  if (text === null) return html`<main><${Problem} error=${error} />${!error && html`<${Loading} />`}</main>`;
  const of = facts.presets.find((one) => one.name === preset);
  const report = check?.report;
  const verdict = !check || checking ? "checking…" : broken ? "the text is broken; the form waits" : report.ok ? (check.occupied ? "OK, but run_dir contains a run" : "OK") : `${report.problems.length} problem${report.problems.length > 1 ? "s" : ""}`;
  const color = !check || checking ? "muted" : !report.ok ? "bad" : check.occupied ? "warn" : "good";
  const gpus = check?.picture?.gpus;
  const policy = check?.picture?.nodes.find((node) => node.name === "policy");
  return html`<div class="compose">
    <div class="tools row">
      <input class="file" aria-label="File name" value=${name} spellcheck="false" disabled=${readOnly} onInput=${(event) => setName(event.target.value)} />
      ${!isSaved && html`<span class="tag warn">not saved</span>`}
      <b class=${color} role="status" id="verdict">${verdict}</b>
      <span class="muted">${check?.seconds ? seconds(check.seconds) : ""}</span>
      <span class="grow"></span>
      ${!readOnly && html`<button onClick=${() => save()} disabled=${isSaved}>Save</button>
        <button class="primary" onClick=${start} disabled=${busy !== "" || !report?.ok}>${busy ? "Starting…" : "Start"}</button>`}
      ${check?.command && html`<${Command} command=${check.command} title="In a terminal" words="Copy command" /><${Command} command=${check.slurm} title="On a Slurm cluster" words="Copy for Slurm" />`}
      <button class="quiet" onClick=${() => go("compose")}>Other file</button>
    </div>
    <${Problem} error=${error || failure} />
    ${taken && taken !== name && html`<p class="notice">${taken} is another file of this folder, and stays as it is. This text is not saved yet; Save writes ${name}.</p>`}
    ${conflict && html`<${Conflict} conflict=${conflict} text=${text} onTake=${take} onKeep=${() => save(conflict.body.version)} />`}
    <div class="halves">
      <section class="left" aria-label="Form">
        <${Tabs} of=${TABS} at=${tab} onChange=${(one) => change({ tab: one === "form" ? null : one })} label="Parts of the experiment" />
        ${tab === "form" && html`<div class="row filters">
            <label>Level <select value=${level} onChange=${(event) => change({ level: event.target.value === "simple" ? null : event.target.value })}>${facts.levels.map((one) => html`<option>${one}</option>`)}</select></label>
            <label>Find <input type="search" value=${find} placeholder="name or help" onInput=${(event) => change({ find: event.target.value })} /></label>
          </div>
          <fieldset class="waits" disabled=${broken || readOnly}>
            ${check?.form ? html`<${Form} nodes=${check.form} filter=${filter} problems=${problems} onEdit=${edit} onLine=${goto} searching=${find !== ""} />` : html`<p class="empty muted">${check?.broken ? "The form waits until the text is right." : "Checking…"}</p>`}
          </fieldset>`}
        ${tab === "plan" && html`<div class="column">
            <div class="row"><label>Machine <select value=${preset} onChange=${(event) => change({ preset: event.target.value === "here" ? null : event.target.value })}>${facts.presets.map((one) => html`<option value=${one.name}>${one.title}</option>`)}</select></label>
              ${of && gpus !== undefined && preset !== "here" && gpus !== of.gpus && html`<button onClick=${() => edit([{ path: ["cluster", "gpus_per_node"], value: of.gpus }])}>Set cluster.gpus_per_node to ${of.gpus}</button>`}
              </div>
            ${preset !== "here" && html`<p class="muted">Another machine for the planner: memory, layouts and problems are those there. It changes nothing in the file, own functions are not called, and Start runs on this machine.</p>`}
            ${of?.gpus > 0 && gpus === 0 && html`<p class="notice">The experiment uses no GPU (cluster.gpus_per_node is 0), so it is planned for CPU and host memory of that machine.</p>`}
            <${Picture} picture=${check?.picture} onSection=${(section) => change({ tab: null, find: section })} />
            ${check?.picture && !broken && html`<${Layouts} text=${check.text} file=${name} preset=${preset} world=${policy?.devices} canRank=${of?.ranks && check.picture.samples} onEdit=${edit} />`}
          </div>`}
        ${tab === "rewards" && html`<${Rewards} node=${check?.form?.find((node) => node.name === "rewards")} facts=${facts} text=${text} file=${name} round=${round} onEdit=${edit} onSaved=${() => setRound((n) => n + 1)} readOnly=${readOnly} />`}
      </section>
      <section class="source" aria-label="YAML">
        <${Editor} value=${text} onChange=${put} marks=${marks} goto=${line} label="Experiment file" />
        ${report && html`<${Problems} report=${report} occupied=${check.occupied} onLine=${goto} />`}
      </section>
    </div>
  </div>`;
}

export default function Compose() {
  const { params } = view.value;
  const isOpen = Boolean(params.file || params.recipe);
  const [facts, error] = useLoaded((signal) => Promise.all([get("/api/compose/facts", {}, signal), get("/api/server", {}, signal)]), []);
  const [files, fileError] = useLoaded((signal) => get("/api/compose/files", {}, signal), [isOpen]);
  if (error) return html`<main><${Problem} error=${error} /></main>`;
  if (!facts) return html`<${Loading} />`;
  if (isOpen) return html`<${Composer} facts=${facts[0]} readOnly=${facts[1].read_only} />`;
  return html`<${Start} facts=${facts[0]} files=${files || []} error=${fileError} />`;
}
