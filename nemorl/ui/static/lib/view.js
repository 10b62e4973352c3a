// The address of the page holds all that is shown: the screen is its path, the rest its query.

import { signal } from "./preact.js";

const read = () => ({
  screen: location.pathname.slice(1) || "runs",
  params: Object.fromEntries(new URLSearchParams(location.search)),
});

export const view = signal(read());

addEventListener("popstate", () => {
  view.value = read();
});

// Names in one parameter.
export const joinNames = (names) => names.map(encodeURIComponent).join(",");
export const splitNames = (text) => (text || "").split(",").filter(Boolean).map(decodeURIComponent);

export function address(screen, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given).toString();
  return `/${screen}${query ? `?${query}` : ""}`;
}

export function go(screen, params = {}) {
  history.pushState(null, "", address(screen, params));
  view.value = read();
}

// Replaces parameters; those that are null disappear. A step back leads to the view before `go`.
export function change(params) {
  const { screen, params: old } = view.value;
  history.replaceState(null, "", address(screen, { ...old, ...params }));
  view.value = read();
}

// Of links: follow them without loading the page again, unless another tab or window is meant.
export function followLink(event) {
  const link = event.target.closest("a[href^='/']");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  history.pushState(null, "", link.getAttribute("href"));
  view.value = read();
}
