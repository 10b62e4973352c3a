// The frame of every screen: the bar on top, the screen of the address, and the theme.

import { html, render, signal, useEffect } from "./lib/preact.js";
import { server } from "./lib/server.js";
import { address, followLink, joinNames, splitNames, view } from "./lib/view.js";
import { Loading, Problem } from "./lib/widgets.js";

const SCREENS = { runs: "Runs", compose: "Compose", watch: "Watch", read: "Read", compare: "Compare" };
const THEMES = ["auto", "light", "dark"];

const screens = signal({}); // loaded components by name, or the error of loading them
const theme = signal(localStorage.getItem("nemorl-theme") || "auto");

function load(name) {
  if (name in screens.value) return;
  screens.value = { ...screens.value, [name]: Loading };
  import(`./screens/${name}.js`).then(
    (module) => {
      screens.value = { ...screens.value, [name]: module.default };
    },
    (error) => {
      screens.value = { ...screens.value, [name]: () => html`<main><${Problem} error=${error} /></main>` };
    },
  );
}

function setTheme(name) {
  theme.value = name;
  localStorage.setItem("nemorl-theme", name);
  showTheme();
}

function showTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = theme.value === "auto" ? (dark ? "dark" : "light") : theme.value;
}

function Bar() {
  const { screen, params } = view.value;
  const run = params.run || splitNames(params.runs)[0];
  const of = { watch: { run }, read: { run }, compare: { runs: params.runs || joinNames(run ? [run] : []) }, compose: { file: params.file } };
  const next = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length];
  return html`<header class="bar" onClick=${followLink}>
    <a class="skip" href="#main">To the content</a>
    <a class="brand" href="/runs">nemorl</a>
    <nav aria-label="Screens">
      ${Object.entries(SCREENS).map(
        ([name, title]) =>
          html`<a
            href=${address(name, of[name])}
            aria-current=${name === screen ? "page" : undefined}
            hidden=${!run && (name === "watch" || name === "read")}
            >${title}</a
          >`,
      )}
    </nav>
    <span class="grow"></span>
    ${server.value && html`<span class="muted root" title=${server.value.root}><bdi>${server.value.root}</bdi></span>`}
    ${server.value?.read_only && html`<span class="tag">read only</span>`}
    <button class="quiet" onClick=${() => setTheme(next)} title="Change the theme">${theme.value}</button>
  </header>`;
}

function App() {
  const { screen } = view.value;
  const known = screen in SCREENS ? screen : "runs";
  useEffect(() => load(known), [known]);
  useEffect(() => {
    const run = view.value.params.run || view.value.params.file || "";
    document.title = [run, SCREENS[known], "nemorl"].filter(Boolean).join(" · ");
  });
  const Screen = screens.value[known] || Loading;
  return html`<${Bar} /><div id="main" class="screen" tabindex="-1" onClick=${followLink}><${Screen} /></div>`;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
showTheme();
render(html`<${App} />`, document.body);
