// A table of any number of rows, of which only those in sight exist. Its bar stands for all rows, since browsers
// limit the height of an element to fewer pixels than a million rows have.

import { html, useEffect, useMemo, useRef, useState } from "./preact.js";

const PAGE = 100; // rows of one request
const MAX_PAGES = 60; // that are kept
const HEIGHT = 26; // pixels of a row
const MAX_PIXELS = 4_000_000; // of the bar

// The rows of a list whose pages `load(offset, count, signal)` gets; `key` names the list. Returns a function that
// gives a row, or undefined until it is there, and the last error.
export function usePages(load, key) {
  const [, redraw] = useState(0);
  const list = useMemo(() => ({ pages: new Map(), loading: new Map(), error: null }), [key]);
  useEffect(
    () => () => {
      for (const control of list.loading.values()) control.abort();
    },
    [list],
  );
  const ask = (page) => {
    if (list.pages.has(page) || list.loading.has(page) || list.error) return;
    // What has left the sight is not waited for.
    for (const [other, control] of list.loading) if (Math.abs(other - page) > 2) control.abort();
    const control = new AbortController();
    list.loading.set(page, control);
    load(page * PAGE, PAGE, control.signal).then(
      (rows) => {
        list.loading.delete(page);
        list.pages.set(page, rows);
        if (list.pages.size > MAX_PAGES) list.pages.delete(list.pages.keys().next().value);
        redraw((n) => n + 1);
      },
      (error) => {
        list.loading.delete(page);
        if (!control.signal.aborted) list.error = error;
        redraw((n) => n + 1);
      },
    );
  };
  const rowAt = (at, wait) => {
    const page = Math.floor(at / PAGE);
    if (!wait) ask(page);
    return list.pages.get(page)?.[at % PAGE];
  };
  return [rowAt, list.error];
}

// `columns` are [{key, title, show(row), align, help, width}]; `at` is the row of the cursor. `onMove(at)` is called
// by the arrow keys, `onOpen(at)` by Enter and a click, `onSort(sort)` with "key" or "-key".
export function Grid({ count, columns, rowAt, at, onMove, onOpen, sort, onSort, label, rowClass = () => "" }) {
  const box = useRef(null);
  const bar = useRef(null);
  const [first, setFirst] = useState(0);
  const [visible, setVisible] = useState(20);
  const [settled, setSettled] = useState(0);
  const last = Math.max(0, count - visible);
  const pixels = Math.min(count * HEIGHT, MAX_PIXELS);
  const start = Math.max(0, Math.min(first, last));

  useEffect(() => {
    const watch = new ResizeObserver(() => {
      if (box.current) setVisible(Math.max(1, Math.floor(box.current.clientHeight / HEIGHT) - 1));
    });
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    // Pages are asked for once the rows rest, so that a drag over a million rows asks for few.
    const timer = setTimeout(() => setSettled(start), 40);
    return () => clearTimeout(timer);
  }, [start]);
  useEffect(() => {
    if (at === null || at === undefined) return;
    if (at < start) scroll(at);
    else if (at >= start + visible) scroll(at - visible + 1);
  }, [at, visible]);

  const scroll = (row) => {
    const next = Math.max(0, Math.min(Math.round(row), last));
    setFirst(next);
    const room = bar.current.scrollHeight - bar.current.clientHeight;
    bar.current.moved = last ? (room * next) / last : 0;
    bar.current.scrollTop = bar.current.moved;
  };
  const onBar = () => {
    const { scrollTop, scrollHeight, clientHeight, moved } = bar.current;
    if (moved !== undefined && Math.abs(scrollTop - moved) < 1.5) return; // by `scroll`
    bar.current.moved = undefined;
    setFirst(Math.round((last * scrollTop) / Math.max(1, scrollHeight - clientHeight)));
  };
  const onWheel = (event) => {
    if (!event.deltaY || event.shiftKey || !last) return;
    event.preventDefault();
    const rows = event.deltaMode ? event.deltaY : event.deltaY / HEIGHT;
    scroll(start + (Math.abs(rows) < 1 ? Math.sign(rows) : rows));
  };
  useEffect(() => {
    const element = box.current;
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  });
  const onKey = (event) => {
    if (event.target.closest("button")) return;
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: visible, PageUp: -visible, Home: -count, End: count };
    if (event.key === "Enter" && at !== null && at !== undefined) onOpen(at);
    else if (event.key in moves && count) {
      const from = at ?? (moves[event.key] > 0 ? start - 1 : start + 1);
      onMove(Math.max(0, Math.min(count - 1, from + moves[event.key])));
    } else return;
    event.preventDefault();
  };

  const widths = columns.map(({ width }) => width || 76);
  const template = widths.map((width) => `minmax(0, ${width}fr)`).join(" ");
  const least = `${widths.reduce((sum, width) => sum + width, 0)}px`;
  const rows = [];
  for (let n = start; n < Math.min(count, start + visible); n += 1) {
    const row = rowAt(n, settled !== start);
    rows.push(
      html`<div
        key=${n}
        id=${`row${n}`}
        class=${`grid-row ${n === at ? "here" : ""} ${row ? rowClass(row) : ""}`}
        role="row"
        aria-rowindex=${n + 2}
        aria-selected=${n === at}
        onClick=${() => onOpen(n)}
      >
        ${columns.map(({ key, show, align }) => html`<span key=${key} role="gridcell" class=${align}>${row ? show(row) : "…"}</span>`)}
      </div>`,
    );
  }
  const [by, down] = [sort?.replace("-", ""), sort?.startsWith("-")];
  return html`<div class="grid-box">
    <div
      class="grid"
      ref=${box}
      tabindex="0"
      role="grid"
      aria-label=${label}
      aria-rowcount=${count + 1}
      aria-activedescendant=${at !== null && at !== undefined ? `row${at}` : undefined}
      onKeyDown=${onKey}
      style=${{ "--columns": template, "--least": least }}
    >
      <div class="grid-row head" role="row" aria-rowindex="1">
        ${columns.map(
          ({ key, title, align, help }) =>
            html`<span role="columnheader" class=${align} title=${help} aria-sort=${by === key ? (down ? "descending" : "ascending") : undefined}>
              <button onClick=${() => onSort(by === key && !down ? `-${key}` : by === key ? "" : key)}>
                ${title}${by === key ? (down ? " ↓" : " ↑") : ""}
              </button>
            </span>`,
        )}
      </div>
      ${rows}
    </div>
    <div class="grid-bar" ref=${bar} onScroll=${onBar} tabindex="-1" aria-hidden="true" hidden=${count <= visible}>
      <div style=${{ height: `${pixels}px` }}></div>
    </div>
  </div>`;
}
