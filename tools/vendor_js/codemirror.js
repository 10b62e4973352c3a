// An editor of YAML and Python with line numbers, search, undo and marks of problems.
export { Compartment, EditorState, StateEffect, StateField, Transaction } from "@codemirror/state";
export {
  Decoration, EditorView, WidgetType, drawSelection, highlightActiveLine, hoverTooltip, keymap, lineNumbers,
} from "@codemirror/view";
export { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
export { HighlightStyle, bracketMatching, indentOnInput, syntaxHighlighting } from "@codemirror/language";
export { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
export { highlightSelectionMatches, searchKeymap } from "@codemirror/search";
export { python } from "@codemirror/lang-python";
export { yaml } from "@codemirror/lang-yaml";
export { tags } from "@lezer/highlight";
