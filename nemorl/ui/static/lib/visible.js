// Text of a model with what a page would not show: spaces, control characters, and those that change the direction
// of the text or have no width.

const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

const named = (character) => {
  const code = character.codePointAt(0);
  if (character === "\n" || character === "\t") return character;
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
};

// `whitespace`: also show spaces, tabs and line ends, which stay where they are.
export function visible(text, whitespace = false) {
  const shown = text.replace(HIDDEN, named);
  return whitespace ? shown.replace(/ /g, "·").replace(/\t/g, "⇥\t").replace(/\n/g, "↵\n") : shown;
}
