// Lines over steps and histograms, by uPlot, in the colors of the theme.

import UPlot from "../vendor/uplot.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import { number } from "./widgets.js";

export const PALETTE = ["#3b82d6", "#e07b39", "#3a9d5d", "#b5549c", "#8a6fd1", "#b59b2a", "#2fa3a3", "#c94f4f", "#7d8894", "#d08fc4", "#8fb339", "#a8704a"];

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axes(xLabel, log, whole) {
  // Functions: a theme that changes draws the chart again.
  const [stroke, grid] = [() => style("--muted"), { stroke: () => style("--line"), width: 1 }];
  const axis = { stroke, grid, ticks: { ...grid, size: 4 }, font: "11px system-ui", values: (_, splits) => ticks(splits) };
  return [
    { ...axis, size: 32, label: xLabel, labelSize: 16, labelFont: "11px system-ui", ...(whole ? { incrs: WHOLE } : {}) },
    { ...axis, size: 56, ...(log ? { filter: undefined } : {}) },
  ];
}

// Distances of ticks at which nothing is between two steps or positions.
const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const MAX_DIGITS = 15; // that a number has

// As `number`, but with digits behind the point of large numbers, too.
function tick(value, digits) {
  const whole = String(Math.trunc(Math.abs(value))).length;
  if (whole < 4 || whole > MAX_DIGITS) return number(value, digits);
  return value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(whole, digits) });
}

// Texts of ticks, with as many digits as tell them apart.
export function ticks(values) {
  const shown = values.filter((value) => value !== null);
  for (let digits = 3; ; digits += 1) {
    const texts = values.map((value) => (value === null ? "" : tick(value, digits)));
    const different = new Set(texts.filter((_, at) => values[at] !== null)).size;
    if (different === new Set(shown).size || digits === MAX_DIGITS) return texts;
  }
}

// `series` are [{name, x, y, color, dash, raw}] with typed arrays, or arrays of numbers with null where there is
// none; those with `raw` are drawn thin and pale behind. `onPick(x)` is called for a click, `onZoom(min, max)` for
// a selected range and with nulls for a double click.
export function Lines({ series, height = 190, xLabel, log = false, onPick, onZoom, range, sync, label }) {
  const box = useRef(null);
  const calls = useRef({});
  calls.current = { onPick, onZoom };
  useEffect(() => {
    if (!series.length) return undefined;
    const data = joined(series);
    const only = data[0].length === 1 ? data[0][0] : undefined; // its own place in the middle
    const positive = log && series.every(({ y }) => y.every((value) => !(value <= 0)));
    const options = {
      width: Math.max(120, box.current.clientWidth),
      height,
      scales: {
        x: { time: false, ...(range ? { range: () => range } : {}), ...(only === undefined ? {} : { range: [only - 1, only + 1] }) },
        y: positive ? { distr: 3 } : {},
      },
      axes: axes(xLabel, positive, data[0].every(Number.isInteger)),
      cursor: { drag: { x: Boolean(onZoom), y: false }, ...(sync ? { sync: { key: sync } } : {}), points: { size: 6 } },
      legend: { show: true, live: true, markers: { width: 2 } },
      series: [
        { label: xLabel || "x", value: (_, value) => (value === null ? "" : number(value)) },
        ...series.map(({ name, color, dash, raw, y, points }, at) => ({
          label: name,
          stroke: color || PALETTE[at % PALETTE.length],
          width: raw ? 1 : 1.6,
          alpha: raw ? 0.35 : 1,
          dash,
          spanGaps: true,
          points: { show: points ?? y.filter((value) => value !== null).length < 3, fill: () => style("--bg") },
          value: (_, value) => (value === null || value === undefined ? "" : number(value)),
        })),
      ],
      hooks: {
        setSelect: [
          (plot) => {
            if (!plot.select.width) return;
            const at = [plot.select.left, plot.select.left + plot.select.width].map((x) => plot.posToVal(x, "x"));
            calls.current.onZoom?.(...at);
          },
        ],
      },
    };
    const plot = new UPlot(options, data, box.current);
    plot.over.addEventListener("click", () => {
      const at = plot.cursor.idx;
      if (at !== null && at !== undefined && !plot.select.width) calls.current.onPick?.(plot.data[0][at]);
    });
    plot.over.addEventListener("dblclick", () => calls.current.onZoom?.(null, null));
    const watch = new ResizeObserver(() => {
      const width = box.current?.clientWidth;
      if (width && Math.abs(width - plot.width) > 1) plot.setSize({ width, height });
    });
    watch.observe(box.current);
    const redraw = new MutationObserver(() => plot.redraw());
    redraw.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => {
      watch.disconnect();
      redraw.disconnect();
      plot.destroy();
    };
  }, [series, height, xLabel, log, range?.[0], range?.[1]]);
  return html`<div class="chart" ref=${box} role="img" aria-label=${label || series.map((each) => each.name).join(", ")}></div>`;
}

// One x for all series, as uPlot wants it. Infinities have no place in a chart: they are gaps.
function joined(series) {
  const tables = series.map(({ x, y }) => [Array.from(x), Array.from(y, (v) => (Number.isFinite(v) ? v : null))]);
  if (tables.every(([x]) => x.length === tables[0][0].length && x.every((v, at) => v === tables[0][0][at]))) {
    return [tables[0][0], ...tables.map(([, y]) => y)];
  }
  return UPlot.join(tables);
}

// Bars that are buttons: `bins` are [{low, high, count}], of which `chosen` says whether one is lit. They are one
// stop of the Tab key; the arrow keys, Home and End move in them.
export function Histogram({ bins, onPick, chosen = () => false, height = 72, label }) {
  const [here, setHere] = useState(0);
  const most = Math.max(1, ...bins.map((bin) => bin.count));
  const stop = Math.min(here, bins.length - 1);
  const move = (event) => {
    const next = { ArrowRight: stop + 1, ArrowLeft: stop - 1, Home: 0, End: bins.length - 1 }[event.key];
    if (next === undefined || !bins[next]) return;
    event.preventDefault();
    setHere(next);
    event.currentTarget.children[next].focus();
  };
  return html`<div class="histogram" role="group" aria-label=${label} onKeyDown=${move} style=${{ height: `${height}px` }}>
    ${bins.map((bin, at) => {
      const text = `${number(bin.low, 3)} to ${number(bin.high, 3)}: ${number(bin.count)}`;
      return html`<button
        class=${chosen(bin) ? "lit" : ""}
        title=${text}
        aria-label=${text}
        aria-pressed=${chosen(bin)}
        disabled=${!onPick}
        tabindex=${at === stop ? 0 : -1}
        onFocus=${() => setHere(at)}
        onClick=${() => onPick?.(bin)}
        ><i style=${{ height: `${(100 * bin.count) / most}%` }}></i
      ></button>`;
    })}
  </div>`;
}
