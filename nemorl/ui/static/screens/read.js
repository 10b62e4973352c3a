import { html } from "../lib/preact.js";
import { Empty } from "../lib/widgets.js";

export default function Screen() {
  return html`<main><${Empty}>Not built yet.<//></main>`;
}
