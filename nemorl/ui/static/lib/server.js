// Facts of the server: {root, read_only}; null until they are there.

import { signal } from "./preact.js";
import { get } from "./api.js";

export const server = signal(null);

get("/api/server").then(
  (facts) => {
    server.value = facts;
  },
  () => {}, // the screen says it
);
