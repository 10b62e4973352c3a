// A text editor with line numbers, colors and marks at lines, by CodeMirror. Escape, then Tab leaves it.

import {
  EditorState,
  EditorView,
  HighlightStyle,
  Transaction,
  bracketMatching,
  defaultKeymap,
  drawSelection,
  highlightActiveLine,
  highlightSelectionMatches,
  history,
  historyKeymap,
  indentOnInput,
  indentWithTab,
  keymap,
  lineNumbers,
  lintGutter,
  lintKeymap,
  python,
  searchKeymap,
  setDiagnostics,
  syntaxHighlighting,
  tags,
  yaml,
} from "../vendor/codemirror.js";
import { html, useEffect, useRef } from "./preact.js";

const LANGUAGES = { yaml, python };
const nonce = document.querySelector("meta[name=style-nonce]")?.content || "";

const look = EditorView.theme({
  "&": { height: "100%", fontSize: "12.5px", backgroundColor: "var(--bg)", color: "var(--fg)" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.5" },
  ".cm-content": { caretColor: "var(--fg)" },
  "&.cm-focused": { outline: "2px solid var(--accent)", outlineOffset: "-2px" },
  ".cm-gutters": { backgroundColor: "var(--panel)", color: "var(--muted)", border: "none" },
  ".cm-activeLine, .cm-activeLineGutter": { backgroundColor: "var(--accent-soft)" },
  ".cm-cursor": { borderLeftColor: "var(--fg)" },
  "&.cm-focused .cm-selectionBackground, .cm-selectionBackground": { backgroundColor: "var(--line)" },
  ".cm-tooltip, .cm-panels": { backgroundColor: "var(--panel)", color: "var(--fg)", borderColor: "var(--line)" },
  ".cm-diagnostic-error": { borderLeftColor: "var(--bad)" },
  ".cm-diagnostic-info": { borderLeftColor: "var(--muted)" },
});

const colors = HighlightStyle.define([
  { tag: [tags.comment], color: "var(--muted)", fontStyle: "italic" },
  { tag: [tags.propertyName, tags.definition(tags.propertyName), tags.function(tags.variableName)], color: "var(--accent)" },
  { tag: [tags.string], color: "var(--good)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--warn)" },
  { tag: [tags.keyword], color: "var(--bad)" },
]);

// A browser that replaces a selection itself keeps its look by style attributes, which the page's policy refuses.
function typeOverSelection(event, view) {
  if (event.inputType !== "insertText" || !event.data || view.composing || view.state.readOnly || view.state.selection.main.empty) return false;
  event.preventDefault();
  view.dispatch(view.state.replaceSelection(event.data), { userEvent: "input.type", scrollIntoView: true });
  return true;
}

// `marks` are [{line, message, severity}] from line 1; with a new `goto` {line} that line comes into view. A `value`
// from outside changes only the characters that differ, so the cursor and the history stay.
export function Editor({ value, onChange, language = "yaml", marks = [], goto, label, readOnly = false }) {
  const box = useRef(null);
  const view = useRef(null);
  const calls = useRef({});
  const typed = useRef([]); // texts that were reported and have not come back as `value`
  calls.current = { onChange };
  useEffect(() => {
    const changed = EditorView.updateListener.of((update) => {
      const own = update.transactions.some((one) => one.annotation(Transaction.userEvent) !== "outside");
      if (!update.docChanged || !own) return;
      const text = update.state.doc.toString();
      typed.current.push(text);
      calls.current.onChange?.(text);
    });
    const state = EditorState.create({
      doc: value,
      extensions: [
        EditorView.cspNonce.of(nonce),
        EditorView.contentAttributes.of({ "aria-label": `${label} (Escape, then Tab leaves)` }),
        EditorState.readOnly.of(readOnly),
        EditorView.domEventHandlers({ beforeinput: typeOverSelection }),
        lineNumbers(),
        lintGutter(),
        history(),
        drawSelection(),
        indentOnInput(),
        bracketMatching(),
        highlightActiveLine(),
        highlightSelectionMatches(),
        syntaxHighlighting(colors),
        LANGUAGES[language](),
        keymap.of([indentWithTab, ...defaultKeymap, ...historyKeymap, ...searchKeymap, ...lintKeymap]),
        changed,
        look,
      ],
    });
    view.current = new EditorView({ state, parent: box.current });
    return () => view.current.destroy();
  }, []);
  useEffect(() => {
    const old = view.current.state.doc.toString();
    // A page that is behind fast typing shows what was typed before: no change from outside.
    const place = typed.current.lastIndexOf(value);
    typed.current = typed.current.slice(place + 1);
    if (place >= 0 || old === value) return;
    typed.current = [];
    let start = 0;
    while (start < Math.min(old.length, value.length) && old[start] === value[start]) start += 1;
    let end = 0;
    const most = Math.min(old.length, value.length) - start;
    while (end < most && old[old.length - 1 - end] === value[value.length - 1 - end]) end += 1;
    const changes = { from: start, to: old.length - end, insert: value.slice(start, value.length - end) };
    view.current.dispatch({ changes, annotations: Transaction.userEvent.of("outside") });
  }, [value]);
  useEffect(() => {
    const { doc } = view.current.state;
    const found = marks.map(({ line, message, severity = "error" }) => {
      const at = doc.line(Math.max(1, Math.min(line || 1, doc.lines)));
      if (!at.length) return { from: Math.max(0, at.from - 1), to: at.to, severity, message }; // with the line break
      return { from: at.from + (/^\s*/.exec(at.text)[0].length % (at.length + 1)), to: at.to, severity, message };
    });
    view.current.dispatch(setDiagnostics(view.current.state, found));
  }, [marks, value]);
  useEffect(() => {
    if (!goto) return;
    const { doc } = view.current.state;
    const at = doc.line(Math.max(1, Math.min(goto.line, doc.lines)));
    view.current.dispatch({ selection: { anchor: at.from }, effects: EditorView.scrollIntoView(at.from, { y: "center" }) });
    view.current.focus();
  }, [goto]);
  return html`<div class="editor" ref=${box}></div>`;
}
