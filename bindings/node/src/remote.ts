/** Environments of a longstep server, driven from JavaScript. */

import { randomBytes } from "node:crypto";
import { Client } from "./client.js";
import type { ClientKeys } from "./curve.js";
import type { Info, Start } from "./environments.js";
import { ProtocolError } from "./errors.js";
import { REPLY_LIMITS } from "./limits.js";
import type { Value } from "./values.js";

export interface RemoteOptions {
  numSlots: number;
  /** What to ask for; the only one that the server has if it is not given. */
  environment?: string;
  name?: string;
  connectTimeoutS?: number;
  /** Required for an address that is not on this machine. */
  keys?: ClientKeys;
}

export interface Prompt {
  messages: Array<{ role: string; content: string }>;
  images: Value[];
  numTokens: number | null;
  dropped: Array<{ part: string; how: string; numCharacters: number }>;
}

export interface EnvResult {
  slot: number;
  /** Of an agent environment the prompt's text, of a raw one its own; null when `error` is given. */
  observation: Value;
  reward: number;
  terminated: boolean;
  truncated: boolean;
  info: Info;
  /** What the model reads, of an agent environment. */
  prompt: Prompt | null;
  /** `Type: message` of what the environment raised; the slot must be reset then. */
  error: string | null;
  seconds: number;
}

/** To do in one slot: exactly one of `reset` and `action`. */
export interface Command {
  slot: number;
  reset?: Partial<Start>;
  action?: Value;
}

/** What the server says of its environments. */
export interface Traits {
  environment: string;
  /** `agent`: actions are a model's completions; `raw`: the environment's own. */
  kind: "agent" | "raw";
  blocking: boolean;
  step_timeout_s: number;
  reset_timeout_s: number;
}

/** Slots with one environment each. A lost server is an error here: nothing is built again. */
export class RemoteEnvs {
  private constructor(
    private readonly client: Client,
    readonly traits: Traits,
    readonly numSlots: number,
  ) {}

  static async connect(address: string, options: RemoteOptions): Promise<RemoteEnvs> {
    const { numSlots, environment, ...rest } = options;
    const client = await Client.connect(address, { service: "longstep.env", version: 1, limits: REPLY_LIMITS, ...rest });
    try {
      const owner = randomBytes(8).readBigUInt64BE() >> 1n;
      const order = { environment: environment ?? null, num_slots: numSlots, owner };
      const traits = (await client.call("open", order, { timeoutS: 120 })) as unknown as Traits;
      return new RemoteEnvs(client, traits, numSlots);
    } catch (error) {
      await client.close();
      throw error;
    }
  }

  /** Do commands, one message for all of them, or one for each where the server's slots do not wait for each other. */
  async run(commands: Command[]): Promise<EnvResult[]> {
    if (commands.length === 0) return [];
    if (this.traits.blocking && commands.length > 1)
      return (await Promise.all(commands.map((command) => this.run([command])))).flat();
    const operations = commands.map(({ reset }) => (reset === undefined ? "step" : "reset"));
    const args = commands.map(({ reset, action }) =>
      reset === undefined ? (action ?? null) : [reset.seed ?? null, reset.options ?? null],
    );
    const limits = operations.map((name) => (name === "step" ? this.traits.step_timeout_s : this.traits.reset_timeout_s));
    const timeoutS = 1 + limits.reduce((sum, limit) => sum + limit, 0);
    const body = [commands.map(({ slot }) => slot), operations, args] as Value;
    return readRows(await this.client.call("run", body, { timeoutS }), commands, this.traits.kind);
  }

  async reset(slot: number, start: Partial<Start> = {}): Promise<EnvResult> {
    return (await this.run([{ slot, reset: start }]))[0] as EnvResult;
  }

  async step(slot: number, action: Value): Promise<EnvResult> {
    return (await this.run([{ slot, action }]))[0] as EnvResult;
  }

  /** Close the environments and the session. */
  close(): Promise<void> {
    return this.client.close();
  }
}

function readRows(reply: Value, commands: Command[], kind: string): EnvResult[] {
  const isReply =
    Array.isArray(reply) && reply.length === 7 && reply.every((column) => Array.isArray(column) && column.length === commands.length);
  if (!isReply) throw new ProtocolError(`expected 7 columns of ${commands.length} rows as a reply`);
  const table = reply as any[][];
  return commands.map(({ slot }, index) => {
    const [observation, reward, terminated, truncated, info, error, seconds] = table.map((column) => column[index]);
    const prompt = kind === "agent" && error === null ? readPrompt(info) : null;
    const seen = prompt === null || observation !== null ? observation : prompt.messages.map(({ content }) => content).join("\n\n");
    return { slot, observation: seen, reward, terminated, truncated, info, prompt, error, seconds };
  });
}

function readPrompt(info: any): Prompt {
  const [spoken, images, numTokens, cuts] = Array.isArray(info.prompt) ? info.prompt : [];
  if (![spoken, images, cuts].every(Array.isArray)) throw new ProtocolError("expected a prompt in the info of an agent environment");
  const every = (list: any[], size: number): any[][] =>
    Array.from({ length: Math.floor(list.length / size) }, (_, index) => list.slice(size * index, size * (index + 1)));
  return {
    messages: every(spoken, 2).map(([role, content]) => ({ role, content })),
    images: images.map((image: Value) => image ?? info.observation),
    numTokens,
    dropped: every(cuts, 3).map(([part, how, numCharacters]) => ({ part, how, numCharacters })),
  };
}
