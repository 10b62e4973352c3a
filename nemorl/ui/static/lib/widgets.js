// Pieces that several screens show.

import { html, useEffect, useState } from "./preact.js";

export const Loading = () => html`<p class="muted loading" role="status">Loading…</p>`;

export const Empty = ({ children }) => html`<p class="empty muted">${children}</p>`;

// A sentence with the place that it concerns and what to do.
export function Problem({ error }) {
  if (!error) return null;
  return html`<div class="problem" role="alert">
    <b>${error.message || String(error)}</b>
    ${error.place && html`<div class="muted">at ${error.place}</div>`}
    ${error.fix && html`<div>${error.fix}</div>`}
  </div>`;
}

// [value, error, loading] of a promise that `load(signal)` makes, again whenever one of `keys` changes. The former
// value stays until the next one is there.
export function useLoaded(load, keys) {
  const [state, setState] = useState([null, null, true]);
  useEffect(() => {
    const control = new AbortController();
    setState(([value]) => [value, null, true]);
    load(control.signal).then(
      (value) => control.signal.aborted || setState([value, null, false]),
      (error) => control.signal.aborted || setState(([value]) => [value, error, false]),
    );
    return () => control.abort();
  }, keys);
  return state;
}

export function Tabs({ of, at, onChange, label }) {
  const step = (event) => {
    const names = Object.keys(of);
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const next = names[(names.indexOf(at) + move + names.length) % names.length];
    onChange(next);
    event.currentTarget.querySelector(`[data-tab="${next}"]`)?.focus();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${step}>
    ${Object.entries(of).map(
      ([name, title]) =>
        html`<button
          role="tab"
          data-tab=${name}
          aria-selected=${name === at}
          tabindex=${name === at ? 0 : -1}
          onClick=${() => onChange(name)}
          >${title}</button
        >`,
    )}
  </div>`;
}

// A table whose columns sort: `columns` are [{key, title, value(row), show(row), align}], `sort` is "key" or "-key".
export function Table({ columns, rows, sort, onSort, rowKey, rowProps = () => ({}), label }) {
  const down = sort?.startsWith("-");
  const by = columns.find((column) => column.key === sort?.replace("-", ""));
  const shown = by ? [...rows].sort((a, b) => compare(by.value(a), by.value(b)) * (down ? -1 : 1)) : rows;
  return html`<table class="table" aria-label=${label}>
    <thead>
      <tr>
        ${columns.map(
          ({ key, title, align, help }) =>
            html`<th
              class=${align}
              title=${help}
              aria-sort=${by?.key === key ? (down ? "descending" : "ascending") : undefined}
            >
              ${onSort
                ? html`<button onClick=${() => onSort(by?.key === key && !down ? `-${key}` : key)}>
                    ${title}${by?.key === key ? (down ? " ↓" : " ↑") : ""}
                  </button>`
                : title}
            </th>`,
        )}
      </tr>
    </thead>
    <tbody>
      ${shown.map(
        (row) =>
          html`<tr key=${rowKey(row)} ...${rowProps(row)}>
            ${columns.map(({ show, value, align }) => html`<td class=${align}>${(show || value)(row)}</td>`)}
          </tr>`,
      )}
    </tbody>
  </table>`;
}

// What is unknown comes last.
export function compare(a, b) {
  const none = (value) => value === null || value === undefined || value === "" || Number.isNaN(value);
  if (none(a) || none(b)) return none(a) - none(b);
  return a < b ? -1 : a > b ? 1 : 0;
}

// Numbers as in the tables of the commands: `digits` significant ones. "NaN" and "Infinity" come as texts.
export function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  const x = Number(value);
  if (!Number.isFinite(x)) return String(x).replace("Infinity", "∞");
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return x.toLocaleString("en-US");
  if (Math.abs(x) >= 1000 && Math.abs(x) < 1e15) return Math.round(x).toLocaleString("en-US");
  const rounded = Number(x.toPrecision(digits));
  return Math.abs(rounded) < 1e-4 ? rounded.toExponential() : String(rounded);
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(Number(value))) return "";
  const x = Number(value);
  if (x > 0 && x < 0.0005) return "<1 ms";
  if (x < 0.0995) return `${Math.round(x * 1000)} ms`;
  if (x < 59.95) return `${x < 9.95 ? x.toFixed(1) : Math.round(x)} s`;
  const whole = Math.round(x);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return whole < 600 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let [x, unit] = [Number(value), 0];
  while (x >= 999.5 && unit < units.length - 1) [x, unit] = [x / 1000, unit + 1];
  return `${unit && x < 9.95 ? x.toFixed(1) : Math.round(x)} ${units[unit]}`;
}

export const percent = (share) => `${Math.round(100 * share)} %`;
