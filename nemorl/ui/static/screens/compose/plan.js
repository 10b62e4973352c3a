// The picture of a run: its parts with devices, processes and memory, and the planner's layouts to choose from.

import { html } from "../../lib/preact.js";
import { post } from "../../lib/api.js";
import { PALETTE } from "../../lib/chart.js";
import { change, view } from "../../lib/view.js";
import { Loading, Problem, bytes, number, percent, useLoaded } from "../../lib/widgets.js";

const [WIDTH, HEIGHT, GAP_X, GAP_Y] = [164, 104, 36, 48];
const FIRST = ["rollout workers", "engine", "environment", "rewards"];
const COLORS = [...PALETTE, "#7fb8a0", "#5d6fa8"];
const short = (text, length = 24) => (text.length > length ? `…${text.slice(1 - length)}` : text);

// Places of the boxes: the way of a trajectory in the first row, models in the second, the rest in the third.
function places(nodes) {
  const rows = [[], [], []];
  for (const role of FIRST) rows[0].push(...nodes.filter((node) => node.role === role));
  const models = ["actor", "critic", "reference", "teacher", "reward model"];
  for (const role of models) rows[1].push(...nodes.filter((node) => node.role === role));
  rows[2] = nodes.filter((node) => !rows[0].includes(node) && !rows[1].includes(node));
  // The actor is between the rewards, which it gets, and the engine, which gets its weights.
  const columns = [[], rows[0].length > 2 ? [2, 3, 1, 0] : [], []];
  if (rows[0].length > 2 && rows[1].length + rows[2].length <= 4) {
    const free = [0, 1, 3, 2].filter((x) => !columns[1].slice(0, rows[1].length).includes(x));
    columns[1] = [...columns[1].slice(0, rows[1].length), ...free];
    rows[1].push(...rows[2].splice(0));
  }
  const found = new Map();
  let y = 0;
  rows.forEach((row, at) => {
    row.forEach((node, x) => found.set(node.name, { x: (columns[at][x] ?? x) * (WIDTH + GAP_X), y: y * (HEIGHT + GAP_Y) }));
    if (row.length) y += 1;
  });
  return found;
}

function Box({ node, at, room, parts, onSection }) {
  const scale = Math.max(room || 0, node.memory || 0) || 1;
  let left = 10;
  const bars = Object.entries(node.parts || {}).map(([part, size]) => {
    const width = ((WIDTH - 20) * size) / scale;
    const bar = html`<rect x=${left} y="72" width=${Math.min(width, WIDTH - left)} height="9" fill=${COLORS[parts.indexOf(part) % COLORS.length]}>
      <title>${part.replaceAll("_", " ")}: ${bytes(size)}</title>
    </rect>`;
    left += width;
    return left - width < WIDTH - 8 ? bar : null;
  });
  const open = () => onSection(node.section);
  const count = node.processes ? `${node.processes} process${node.processes > 1 ? "es" : ""}` : "";
  const fits = node.memory ? `${bytes(node.memory)}${node.room ? ` of ${bytes(node.room)}` : ""}` : "";
  const said = [node.role, node.model, node.layout, count, fits, node.fits ? "" : "does not fit"].filter(Boolean).join(", ");
  return html`<g
    class=${`box ${node.fits ? "" : "full"}`}
    transform=${`translate(${at.x} ${at.y})`}
    role="button"
    tabindex="0"
    aria-label=${said}
    onClick=${open}
    onKeyDown=${(event) => ["Enter", " "].includes(event.key) && open()}
  >
    <rect class="frame" width=${WIDTH} height=${HEIGHT} rx="6" />
    <text x="10" y="20" class="title">${node.role}${node.name.startsWith("teacher_") ? ` ${node.name.slice(8)}` : ""}</text>
    <text x="10" y="37">${short(node.model || "")}</text>
    <text x="10" y="53">${short([node.layout, node.shares ? "shares devices" : ""].filter(Boolean).join(", "))}</text>
    ${node.memory && html`<rect x="10" y="72" width=${WIDTH - 20} height="9" class="room" />`}${bars}
    <text x="10" y="97">${[count.replace(/ process(es)?/, " proc."), fits].filter(Boolean).join(" · ")}</text>
  </g>`;
}

function Edge({ from, to, what, at }) {
  const [a, b] = [at.get(from), at.get(to)];
  if (!a || !b) return null;
  const [x1, y1, x2, y2] = [a.x + WIDTH / 2, a.y + HEIGHT / 2, b.x + WIDTH / 2, b.y + HEIGHT / 2];
  // Where the line leaves each box.
  const cut = (dx, dy) => Math.min(WIDTH / 2 / (Math.abs(dx) || 1e-9), HEIGHT / 2 / (Math.abs(dy) || 1e-9));
  const t = cut(x2 - x1, y2 - y1);
  const [sx, sy] = [x1 + (x2 - x1) * t, y1 + (y2 - y1) * t];
  const [ex, ey] = [x2 - (x2 - x1) * t, y2 - (y2 - y1) * t];
  return html`<g class="edge">
    <line x1=${sx} y1=${sy} x2=${ex} y2=${ey} marker-end="url(#arrow)" />
    <title>${what} from ${from} to ${to}</title>
    ${Math.abs(sy - ey) > 20 && html`<text x=${(sx + ex) / 2 + 6} y=${(sy + ey) / 2 + 4}>${what}</text>`}
  </g>`;
}

export function Picture({ picture, onSection }) {
  if (!picture) return html`<p class="empty muted">The picture appears when all types are right.</p>`;
  const at = places(picture.nodes);
  const [columns, rows] = [Math.max(...[...at.values()].map((one) => one.x)), Math.max(...[...at.values()].map((one) => one.y))];
  const box = `-2 -2 ${columns + WIDTH + 4} ${rows + HEIGHT + 4}`;
  const used = picture.parts.filter((part) => picture.nodes.some((node) => node.parts?.[part]));
  const { gpus, used_gpus: taken } = picture;
  return html`<div class="picture">
    ${picture.problems.map((problem) => html`<p class="problem" role="alert">${problem}</p>`)}
    ${!picture.known && html`<p class="notice">Memory is unknown until the policy's config.json is on this machine.</p>`}
    <svg viewBox=${box} style=${{ maxWidth: `${columns + WIDTH + 4}px` }} role="group" aria-label="Parts of the run">
      <defs>
        <marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
          <path d="M0 0 L8 4 L0 8 z" class="tip" />
        </marker>
      </defs>
      ${picture.edges.map((edge) => html`<${Edge} ...${edge} at=${at} />`)}
      ${picture.nodes.map((node) => html`<${Box} key=${node.name} node=${node} at=${at.get(node.name)} room=${node.room || picture.room} parts=${used} onSection=${onSection} />`)}
    </svg>
    <p class="legend">
      ${used.map((part) => html`<span><i style=${{ background: COLORS[used.indexOf(part) % COLORS.length] }}></i>${part.replaceAll("_", " ")}</span>`)}
    </p>
    ${gpus > 0
      ? html`<p class=${taken > gpus ? "bad" : "muted"}>${taken} of ${gpus} GPUs are used. The bars are of one process; ${bytes(picture.on_host)} in all are in host memory.</p>`
      : html`<p class=${picture.on_host > picture.room ? "bad" : "muted"}>All processes need ${bytes(picture.on_host)} of ${bytes(picture.room)}; the bars are of one process.</p>`}
  </div>`;
}

const fitting = { true: "yes", false: "no", null: "?" };

// Layouts of the policy, and where the plan of time can rank them, with `ranked` whole runs by the seconds of a step.
export function Layouts({ text, file, preset, world, canRank, onEdit }) {
  const { params } = view.value;
  const devices = Number(params.devices) || null;
  const ranked = canRank && params.ranked === "1";
  const count = devices || (ranked ? null : world);
  const path = ranked ? "/api/compose/suggestions" : "/api/compose/layouts";
  const load = (signal) => post(path, { text, file, preset, devices: count }, signal);
  const [found, error, loading] = useLoaded(load, [text, preset, count, ranked]);
  const rows = found && Boolean(found.rows[0]?.reason) === ranked ? found.rows : [];
  const use = (row) => html`<button disabled=${row.is_current} aria-label=${`Use ${row.name || row.layout}`} onClick=${() => onEdit(row.edits)}>${row.is_current ? "in use" : "Use"}</button>`;
  const memory = (row) => `${bytes(row.memory)}${found.room ? ` (${percent(row.memory / found.room)})` : ""}`;
  return html`<section class="column" aria-label="Layouts">
    <div class="row">
      <h2>Layouts</h2>
      <label>on <input class="short" type="number" min="1" max="4096" aria-label="Number of devices" value=${count || found?.devices || ""} onInput=${(event) => change({ devices: Number(event.target.value) || null })} /> devices</label>
      ${canRank && html`<label><input type="checkbox" checked=${ranked} onChange=${(event) => change({ ranked: event.target.checked ? "1" : null })} /> whole runs by seconds of a step</label>`}
      <span class="muted" role="status">${loading ? "planning…" : found ? `${found.count} found` : ""}</span>
    </div>
    <${Problem} error=${error} />
    ${!found && !error && html`<${Loading} />`}
    ${found && !error && !loading && !found.count && html`<p class="muted">No layout divides the model over ${found.devices} devices; try another number.</p>`}
    ${rows.length > 0 && !error && html`<div class="scroll"><table class="table">
      <thead><tr>
        ${(ranked ? ["layout", "seconds", "placement", "engines", "staleness", "memory", "reason", ""] : ["layout", "fits", "memory", "recomputed, offloaded", "kB/token", "idle", ""]).map((title) => html`<th>${title}</th>`)}
      </tr></thead>
      <tbody>
        ${rows.map((row) =>
          ranked
            ? html`<tr><td>${row.layout}</td><td>${number(row.seconds, 3)}</td><td>${row.placement}</td><td>${row.engines}</td><td>${row.staleness}</td><td>${memory(row)}</td><td class="reason">${row.reason}</td><td>${use(row)}</td></tr>`
            : html`<tr class=${row.is_current ? "current" : ""}><td>${row.name}</td><td class=${row.fits === false ? "bad" : ""}>${fitting[row.fits]}</td><td>${memory(row)}</td><td>${row.recompute}</td><td>${number(row.bytes_per_token / 1000, 3)}</td><td>${percent(row.idle)}</td><td>${use(row)}</td></tr>`,
        )}
      </tbody>
    </table></div>`}
  </section>`;
}
