/** The program of the server's IO thread. */

import { parentPort, workerData } from "node:worker_threads";
import { Hub, type Terms, type ToHub } from "./hub.js";

const port = parentPort;
if (port === null) throw new Error("expected to run in a worker thread");
const hub = new Hub(workerData as Terms, (message) => port.postMessage(message));
port.on("message", (message: ToHub) => hub.take(message));
await hub.run();
port.close();
