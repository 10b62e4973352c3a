// The form of an experiment: sections and fields from the schema, filtered by level and search.

import { html, useEffect, useState } from "../../lib/preact.js";

const key = (path) => path.join(".");
const isGroup = (node) => ["section", "sections", "mapping"].includes(node.kind);

// Whether a node is shown: at its level or below, with all words of the search, and always where it was changed or
// has a problem.
export function makeFilter({ levels, level, find, problems }) {
  const shown = levels.slice(0, levels.indexOf(level) + 1);
  const words = find.toLowerCase().split(/\s+/).filter(Boolean);
  const says = (node) => words.every((word) => `${key(node.path)} ${node.help}`.toLowerCase().includes(word));
  const test = (node) => {
    if (isGroup(node)) {
      const below = [...(node.fields || []), ...(node.items || [])];
      const chooses = Boolean(node.nullable || node.variants || node.items);
      if (words.length) return below.some(test) || (chooses && says(node));
      return (shown.includes(node.level) && chooses) || node.is_own || problems.has(key(node.path)) || below.some(test);
    }
    if (words.length) return says(node);
    return shown.includes(node.level) || node.is_own || problems.has(key(node.path));
  };
  return test;
}

const shownValue = (value) =>
  value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);

// The value that a text means for a field; a text that is none stays, for the check to refuse.
function parsed(node, text) {
  if (text === "" && (node.nullable || node.kind !== "text")) return node.nullable ? null : undefined;
  const number = Number(text);
  if (node.kind === "integer" || node.kind === "number") return Number.isFinite(number) ? number : text;
  if (node.kind === "list") {
    const items = text.split(",").map((one) => one.trim()).filter(Boolean);
    return items.map((one) => (["integer", "number"].includes(node.item.kind) && Number.isFinite(Number(one)) ? Number(one) : one));
  }
  if (node.kind === "map" || node.kind === "any") {
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  }
  return text;
}

// What is being typed stays while checks make the form again; Escape takes it back.
function Text({ value, onCommit, ...rest }) {
  const [draft, setDraft] = useState(null);
  useEffect(() => setDraft(null), [value]);
  return html`<input
    type="text"
    ...${rest}
    value=${draft ?? value}
    onInput=${(event) => setDraft(event.target.value)}
    onKeyDown=${(event) => event.key === "Escape" && setDraft(null)}
    onChange=${(event) => event.target.value !== value && onCommit(event.target.value.trim())}
  />`;
}

function Input({ node, id, onSet }) {
  const common = { id, "aria-describedby": `${id}-help`, class: node.kind };
  const set = (value) => onSet(value === undefined ? { path: node.path, remove: true } : { path: node.path, value });
  if (node.kind === "boolean" && !node.nullable) {
    return html`<input type="checkbox" ...${common} checked=${node.value === true} onChange=${(event) => set(event.target.checked)} />`;
  }
  if (node.kind === "choice" || node.kind === "boolean") {
    const choices = node.kind === "boolean" ? [true, false] : node.choices;
    const known = choices.some((one) => one === node.value) || node.value === null;
    return html`<select
      ...${common}
      value=${JSON.stringify(node.value)}
      onChange=${(event) => set(JSON.parse(event.target.value))}
    >
      ${(node.nullable || node.value === null) && html`<option value="null">${node.nullable ? "none" : "choose"}</option>`}
      ${!known && html`<option value=${JSON.stringify(node.value)}>${shownValue(node.value)} (unknown)</option>`}
      ${choices.map((one) => html`<option value=${JSON.stringify(one)}>${String(one)}</option>`)}
    </select>`;
  }
  const text = node.kind === "list" && Array.isArray(node.value) ? node.value.map(shownValue).join(", ") : shownValue(node.value);
  const limits = node.kind === "integer" || node.kind === "number" ? { inputmode: "decimal" } : {};
  const hint = node.required ? "required" : node.nullable ? "none" : "";
  return html`<${Text} ...${common} ...${limits} value=${text} placeholder=${hint} spellcheck="false" onCommit=${(given) => set(parsed(node, given))} />`;
}

function Origin({ node, onLine }) {
  const line = /:(\d+)$/.exec(node.origin);
  if (node.is_own && line) {
    return html`<button class="quiet origin" title=${`Go to ${node.origin}`} onClick=${() => onLine(Number(line[1]))}>line ${line[1]}</button>`;
  }
  if (node.required && (node.value === null || node.value === undefined)) return html`<span class="muted origin">not set</span>`;
  return html`<span class="muted origin" title=${node.origin}>${node.origin === "default" ? "default" : node.origin.replace(/^.*\//, "")}</span>`;
}

const Problems = ({ of }) =>
  (of || []).map((problem) => html`<div class=${problem.isRemark ? "notice" : "problem"} role="alert">${problem.fix}</div>`);

function Field({ node, problems, onEdit, onLine }) {
  const id = `field-${key(node.path)}`;
  const own = problems.get(key(node.path));
  return html`<div class=${`field ${own?.some((problem) => !problem.isRemark) ? "wrong" : ""} ${node.is_own ? "own" : ""}`}>
    <label for=${id} title=${node.type}>${node.name}</label>
    <${Input} node=${node} id=${id} onSet=${(edit) => onEdit([edit])} />
    <${Origin} node=${node} onLine=${onLine} />
    ${node.is_own
      ? html`<button class="quiet reset" title="Remove it from the file" aria-label=${`Reset ${key(node.path)}`} onClick=${() => onEdit([{ path: node.path, remove: true }])}>×</button>`
      : html`<span></span>`}
    <p class="muted help" id=${`${id}-help`}>${node.help} <span class="type">${node.type}</span></p>
    <${Problems} of=${own} />
  </div>`;
}

// The choice of a variant: fields that the new one lacks leave the file with it.
function Variant({ node, onEdit }) {
  const fields = (name) => node.variants.find((one) => one.name === name)?.fields || [];
  const choose = (name) => {
    const drops = fields(node.chosen).filter((field) => !fields(name).includes(field));
    onEdit([{ path: [...node.path, node.tag], value: name, drops }]);
  };
  const known = node.variants.some((one) => one.name === node.chosen);
  const help = node.variants.find((one) => one.name === node.chosen)?.help || "";
  const id = `variant-${key(node.path)}`;
  return html`<div class="field variant">
    <label for=${id}>${node.tag}</label>
    <select id=${id} value=${node.chosen || ""} aria-describedby=${`${id}-help`} onChange=${(event) => choose(event.target.value)}>
      ${!known && html`<option value=${node.chosen || ""}>${node.chosen ? `${node.chosen} (unknown)` : "choose"}</option>`}
      ${node.variants.map((one) => html`<option value=${one.name}>${one.name}</option>`)}
    </select>
    <span></span><span></span>
    <p class="muted help" id=${`${id}-help`}>${help}</p>
  </div>`;
}

// A button that adds a section, an item of a list or an entry of a mapping.
function Add({ node, onEdit }) {
  const [name, setName] = useState("");
  const [variant, setVariant] = useState(node.variants?.[0]?.name || "");
  const value = variant && node.tag ? { [node.tag]: variant } : {};
  const add = () => {
    if (node.kind === "sections") onEdit([{ path: node.path, value, append: true }]);
    else if (node.kind === "mapping") onEdit([{ path: [...node.path, name], value }]);
    else onEdit([{ path: node.path, value }]);
  };
  const several = (node.variants || []).length > 1;
  return html`<div class="row add">
    ${node.kind === "mapping" &&
    html`<input aria-label=${`Name of a new entry of ${key(node.path)}`} placeholder="name" value=${name} onInput=${(event) => setName(event.target.value)} />`}
    ${several &&
    html`<select aria-label=${`Kind of ${key(node.path)}`} value=${variant} onChange=${(event) => setVariant(event.target.value)}>
      ${node.variants.map((one) => html`<option value=${one.name}>${one.name}</option>`)}
    </select>`}
    <button disabled=${node.kind === "mapping" && !/^[a-z][a-z0-9_]*$/.test(name)} onClick=${add}>Add ${node.kind === "section" ? node.name : "one"}</button>
  </div>`;
}

function Node({ node, depth, ...rest }) {
  const { shown, problems, onEdit } = rest;
  if (!shown(node)) return null;
  if (!isGroup(node)) return html`<${Field} node=${node} ...${rest} />`;
  const remove = node.is_own && html`<button class="quiet reset" aria-label=${`Remove ${key(node.path)}`} title="Remove it from the file" onClick=${() => onEdit([{ path: node.path, remove: true }])}>×</button>`;
  const isItem = typeof node.path.at(-1) === "number";
  return html`<fieldset class=${`group depth-${Math.min(depth, 3)}`}>
    <legend>${isItem ? `${node.path.at(-2)} ${node.path.at(-1) + 1}` : node.name} ${remove}</legend>
    ${node.help && html`<p class="muted help">${node.help}</p>`}
    <${Problems} of=${problems.get(key(node.path))} />
    ${node.kind === "section" && node.present && node.tag && html`<${Variant} node=${node} onEdit=${onEdit} />`}
    ${node.kind === "section" && node.tag && html`<${Problems} of=${problems.get(`${key(node.path)}.${node.tag}`)} />`}
    ${(node.fields || []).map((one) => html`<${Node} key=${key(one.path)} node=${one} depth=${depth + 1} ...${rest} />`)}
    ${(node.items || []).map((one) => html`<${Node} key=${key(one.path)} node=${one} depth=${depth + 1} ...${rest} />`)}
    ${(node.kind !== "section" || !node.present) && html`<${Add} node=${node} onEdit=${onEdit} />`}
  </fieldset>`;
}

export function Form({ nodes, filter, problems, onEdit, onLine, searching }) {
  const rest = { shown: filter, problems, onEdit, onLine };
  const used = nodes.filter((node) => !node.unused || node.is_own);
  const plain = used.filter((node) => !isGroup(node) && filter(node));
  const groups = used.filter((node) => isGroup(node) && filter(node));
  const hidden = nodes.filter((node) => node.unused && !node.is_own);
  if (!plain.length && !groups.length) return html`<p class="empty muted">No field has these words.</p>`;
  return html`<div class="form">
    ${plain.map((node) => html`<${Field} key=${key(node.path)} node=${node} ...${rest} />`)}
    ${groups.map(
      (node) => html`<details key=${`${node.name} ${searching}`} open=${searching || node.is_own || node.required}>
        <summary><b>${node.name}</b> <span class="muted">${node.help}</span></summary>
        ${node.unused && html`<p class="notice">${node.unused}: this section has no use.</p>`}
        <${Node} node=${{ ...node, help: "" }} depth=${0} ...${rest} />
      </details>`,
    )}
    ${hidden.length > 0 && html`<p class="muted">Left out: ${hidden.map((node) => `${node.name} (${node.unused})`).join(", ")}.</p>`}
  </div>`;
}
