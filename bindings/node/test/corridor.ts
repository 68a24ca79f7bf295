/**
 * An environment for tests, and a program that serves it: node corridor.js LENGTH PARENT_PID [LOG]. With LONGSTEP_KEYS, the
 * folder of `server.key_secret` and `friend.key`, it requires keys and can be reached from elsewhere.
 */

import { appendFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { loadKeyPair, loadPublicKey, serve, type Environment, type ResetResult, type Start, type StepResult, type Value } from "../src/index.js";

/** Walk right to the end; the same as the corridor of the Python tests. */
export class Corridor implements Environment {
  private place = 0;

  constructor(
    private readonly length = 3,
    private readonly log: string | null = null,
  ) {}

  async reset({ seed, options }: Start): Promise<ResetResult> {
    this.note(`reset ${seed}`);
    this.place = seed === null ? 0 : Number(BigInt(seed) % BigInt(this.length));
    const info = { task_description: "go to the end", ...options, admissible_actions: ["left", "right"] };
    return { observation: this.seen(), info };
  }

  step(action: Value): StepResult {
    this.note(`step ${action}`);
    if (action === "boom") throw new RangeError("no such door");
    if (typeof action === "string" && action.startsWith("sleep")) hang(Number(action.split(" ")[1]));
    this.place = Math.max(0, this.place + ({ left: -1, right: 1 }[action as string] ?? 0));
    const done = this.place >= this.length;
    const info: { [key: string]: Value } = { admissible_actions: ["left", "right"], success: done };
    if (action === "odd") info["odd"] = (() => 0) as unknown as Value;
    return { observation: this.seen(), reward: Number(done), terminated: done, truncated: false, info };
  }

  snapshot(): number {
    return this.place;
  }

  restore(snapshot: unknown): void {
    this.place = snapshot as number;
  }

  close(): void {
    this.note("close");
  }

  private seen(): string {
    return `You stand at ${this.place} of ${this.length}.`;
  }

  private note(text: string): void {
    if (this.log !== null) appendFileSync(this.log, `${text}\n`);
  }
}

/** Occupy this thread, as an environment does that computes. */
function hang(seconds: number): void {
  const end = performance.now() + 1000 * seconds;
  while (performance.now() < end);
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) {
  const [length, parentPid, log] = process.argv.slice(2);
  const make = (): Environment => new Corridor(Number(length), log ?? null);
  const folder = process.env["LONGSTEP_KEYS"];
  const secured = folder !== undefined && {
    address: "tcp://0.0.0.0:*",
    keys: { ...loadKeyPair(`${folder}/server.key_secret`), allowed: [loadPublicKey(`${folder}/friend.key`)] },
  };
  const server = await serve({ name: "js/Corridor-v0", make, parentPid: Number(parentPid), heartbeatS: 0.5, ...secured });
  process.on("SIGTERM", () => void server.stop());
  console.log(server.address);
}
