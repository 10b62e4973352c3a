// Preact, its hooks, signals that components follow, and `html` in place of JSX.
import { h } from "preact";
import htm from "htm";

export { Component, Fragment, createContext, h, render } from "preact";
export { useCallback, useContext, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
export { batch, computed, effect, signal, untracked, useComputed, useSignal, useSignalEffect } from "@preact/signals";
export const html = htm.bind(h);
