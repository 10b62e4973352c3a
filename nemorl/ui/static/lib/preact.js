export * from "../vendor/preact.js";
