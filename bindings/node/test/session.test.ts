/** Servers and clients over real sockets: exactly once, in order, within deadlines, in both languages. */

import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after, test } from "node:test";
import { curveKeyPair, Dealer } from "zeromq";
import { Client } from "../src/client.js";
import type { LongstepError } from "../src/errors.js";
import { Kind, packHead, unpackHead, type Head } from "../src/heads.js";
import { loadKeyPair, loadPublicKey, NDArray, RemoteEnvs, serve, type Environment, type EnvironmentOptions, type Server, type Value } from "../src/index.js";
import { decode, encode } from "../src/wire.js";
import { Corridor } from "./corridor.js";

const folder = mkdtempSync(join(tmpdir(), "longstep-node-test-"));
after(() => rmSync(folder, { recursive: true }));
let numLogs = 0;

const refused = (kind: string, said: RegExp) => (error: LongstepError) => error.kind === kind && said.test(error.message);

/** Serve corridors of nine places, whose log tells what was executed. */
async function corridors(options: Partial<EnvironmentOptions> = {}): Promise<{ server: Server; log: string; steps: () => string[] }> {
  const log = join(folder, `log-${++numLogs}`);
  const server = await serve({ name: "js/Corridor-v0", make: () => new Corridor(9, log), ...options });
  const steps = (): string[] => (existsSync(log) ? readFileSync(log, "utf8") : "").split("\n").filter((line) => line.startsWith("step")).map((line) => line.slice(5));
  return { server, log, steps };
}

/** A DEALER socket and nothing more, with an opened slot that was reset: requests 1 and 2. */
class RawPeer {
  readonly token = randomBytes(16);
  private readonly socket = new Dealer({ linger: 0 });

  constructor(address: string) {
    this.socket.connect(address);
  }

  static async ready(address: string): Promise<RawPeer> {
    const peer = new RawPeer(address);
    await peer.tell(Kind.HELLO, { name: "raw", service: "longstep.env", service_version: 1 });
    assert.equal((await peer.hear())?.kind, Kind.WELCOME);
    await peer.request(1, "open", { environment: null, num_slots: 1, owner: 1 });
    await peer.hear();
    await peer.request(2, "run", [[0], ["reset"], [[0, null]]]);
    await peer.hear();
    return peer;
  }

  tell(kind: Kind, ...fields: Value[]): Promise<void> {
    return this.socket.send([packHead(kind, this.token, ...fields)]);
  }

  send(frames: Uint8Array[]): Promise<void> {
    return this.socket.send(frames);
  }

  request(seq: number, method: string, value: Value, open = [seq], ms = 60_000): Promise<void> {
    const head = packHead(Kind.REQUEST, this.token, seq, Math.max(...open), open, ms, method);
    return this.socket.send([head, ...encode(value)]);
  }

  step(seq: number, action: string, open = [seq]): Promise<void> {
    return this.request(seq, "run", [[0], ["step"], [action]], open);
  }

  async hear(timeoutMs = 20_000): Promise<(Head & { frames: Uint8Array[] }) | null> {
    this.socket.receiveTimeout = timeoutMs;
    try {
      const [head, ...frames] = await this.socket.receive();
      return { ...unpackHead(head as Buffer), frames };
    } catch {
      return null;
    }
  }

  close(): void {
    this.socket.close();
  }
}

test("commands of many slots come back in their order, an exception in its own slot", async () => {
  const { server } = await corridors();
  const envs = await RemoteEnvs.connect(server.address, { numSlots: 3 });
  assert.deepEqual([envs.traits.kind, envs.traits.environment], ["raw", "js/Corridor-v0"]);
  const started = await envs.run([0, 1, 2].map((slot) => ({ slot, reset: { seed: slot, options: { level: 4 } } })));
  assert.deepEqual(started.map(({ observation }) => observation), [0, 1, 2].map((place) => `You stand at ${place} of 9.`));
  assert.equal(started[0]?.info["level"], 4);
  const results = await envs.run(["right", "boom", "odd"].map((action, slot) => ({ slot, action })));
  assert.equal(results[0]?.observation, "You stand at 1 of 9.");
  assert.equal(results[1]?.error, "RangeError: no such door");
  assert.match(results[2]?.error ?? "", /UnsupportedTypeError: .*got function at \$/);
  assert.match((await envs.step(1, "right")).error ?? "", /EnvError: .*reset it/);
  assert.equal((await envs.reset(1, { seed: 5 })).error, null);
  await envs.close();
  await server.stop();
});

test("a repeated step is answered again and taken once", async () => {
  const { server, steps } = await corridors();
  const peer = await RawPeer.ready(server.address);
  const answers: string[] = [];
  for (let round = 0; round < 3; round++) {
    await peer.step(3, "right");
    const heard = await peer.hear();
    answers.push(JSON.stringify(heard?.frames));
  }
  assert.equal(new Set(answers).size, 1);
  assert.deepEqual(steps(), ["right"]);
  await peer.step(4, "left");
  await peer.hear();
  await peer.step(3, "right"); // an old copy of a settled step
  assert.equal(await peer.hear(500), null);
  assert.deepEqual(steps(), ["right", "left"]);
  peer.close();
  await server.stop();
});

test("steps that overtook each other run in their order, one that is given up holds nobody back", async () => {
  const { server, steps } = await corridors();
  const peer = await RawPeer.ready(server.address);
  await peer.step(5, "e", [3, 4, 5]);
  await peer.step(4, "d", [3, 4]);
  assert.equal(await peer.hear(500), null);
  await peer.step(3, "c", [3]);
  for (const seq of [3, 4, 5]) assert.equal((await peer.hear())?.fields[0], seq);
  await peer.step(8, "h", [7, 8]);
  await peer.tell(Kind.PING, 1, 8, [8]);
  const kinds = [(await peer.hear())?.kind, (await peer.hear())?.kind];
  assert.deepEqual(kinds.sort(), [Kind.REPLY, Kind.PONG]);
  assert.deepEqual(steps(), ["c", "d", "e", "h"]);
  peer.close();
  await server.stop();
});

test("garbage changes nothing, and a bad body is answered", async () => {
  const { server, steps } = await corridors();
  const peer = await RawPeer.ready(server.address);
  for (let round = 0; round < 200; round++) await peer.send([randomBytes(round % 60), randomBytes(round % 7)]);
  await peer.send([packHead(Kind.REQUEST, peer.token, 3, 3, [3], 60_000, "run"), Buffer.from("ddffffffff", "hex")]);
  const heard = await peer.hear();
  assert.deepEqual([heard?.kind, heard?.fields[1]], [Kind.ERROR, "ProtocolError"]);
  await peer.step(4, "right");
  assert.equal((await peer.hear())?.kind, Kind.REPLY);
  assert.deepEqual(steps(), ["right"]);
  peer.close();
  await server.stop();
});

test("an environment that hangs is reported at its deadline, and nothing follows it", async () => {
  const { server, steps } = await corridors();
  const peer = await RawPeer.ready(server.address);
  await peer.request(3, "run", [[0], ["step"], ["sleep 3"]], [3], 500);
  await peer.step(4, "right", [3, 4]);
  // the environment occupies this very thread; what the server's own thread said meanwhile is read after it
  const told = new Map<number, string>();
  for (let count = 0; count < 2; count++) {
    const heard = await peer.hear();
    told.set(heard?.fields[0], heard?.fields[1]);
  }
  assert.deepEqual([told.get(3), told.get(4)], ["DeadlineError", "SessionLostError"]);
  assert.deepEqual(steps(), ["sleep 3"]);
  peer.close();
  await server.stop();
});

test("environments that wait do so beside each other", async () => {
  const waiting: Array<() => void> = [];
  const make = (): Environment => ({
    reset: () => ({ observation: "ready" }),
    step: async (action) => {
      if (action === "wait") await new Promise<void>((resolve) => waiting.push(resolve));
      return { observation: String(action), reward: 0, terminated: false, truncated: false };
    },
  });
  const server = await serve({ name: "js/Waiting-v0", make, blocking: true });
  const envs = await RemoteEnvs.connect(server.address, { numSlots: 2 });
  await envs.run([{ slot: 0, reset: {} }, { slot: 1, reset: {} }]);
  const slow = envs.step(0, "wait");
  assert.equal((await envs.step(1, "quick")).observation, "quick");
  waiting.forEach((resolve) => resolve());
  assert.equal((await slow).observation, "wait");
  await envs.close();
  await server.stop();
});

test("arrays travel both ways", async () => {
  const make = (): Environment => ({
    reset: () => ({ observation: NDArray.from(new Float32Array(5000).fill(0.5), [50, 100]) }),
    step: (action) => ({ observation: action, reward: 0, terminated: false, truncated: false }),
  });
  const server = await serve({ name: "js/Arrays-v0", make });
  const envs = await RemoteEnvs.connect(server.address, { numSlots: 1 });
  const first = (await envs.reset(0)).observation as NDArray;
  assert.deepEqual([first.dtype, first.shape], ["<f4", [50, 100]]);
  const action = NDArray.from(new BigInt64Array([1n, -(2n ** 62n)]));
  assert.deepEqual(((await envs.step(0, action)).observation as NDArray).toTypedArray(), action.toTypedArray());
  await envs.close();
  await server.stop();
});

test("a slot stands where another stands", async () => {
  const { server } = await corridors();
  const client = await Client.connect(server.address, { service: "longstep.env", version: 1 });
  await client.call("open", { environment: null, num_slots: 2, owner: 1 }, { timeoutS: 20 });
  const run = async (...body: Value[]): Promise<Value> => ((await client.call("run", body, { timeoutS: 20 })) as Value[])[0] as Value;
  assert.deepEqual(await run([0], ["replay"], [[[2, null], ["right", "right"]]]), [[2, 3, 4].map((place) => `You stand at ${place} of 9.`)]);
  assert.deepEqual(await run([1], ["copy"], [0]), ["You stand at 4 of 9."]);
  assert.deepEqual(await run([1, 0], ["step", "step"], ["right", "left"]), ["You stand at 5 of 9.", "You stand at 3 of 9."]);
  await client.close();
  await server.stop();
});

test("a wrong service, a name in use, an unknown method and a server that is not there are told", async () => {
  const { server } = await corridors();
  const as = (service: string, name?: string) => Client.connect(server.address, { service, version: 1, ...(name === undefined ? {} : { name }) });
  await assert.rejects(as("test.other"), refused("ConfigError", /expected a client of `longstep.env` version 1/));
  const client = await as("longstep.env", "one");
  await assert.rejects(as("longstep.env", "one"), refused("ConfigError", /name that is not in use/));
  await assert.rejects(client.call("jump", null, { timeoutS: 20 }), refused("RegistryError", /expected one of the methods open, run/));
  await assert.rejects(client.call("run", [[0], ["step"], ["x"]], { timeoutS: 20 }), refused("ConfigError", /expected `open` before/));
  await client.close();
  const address = `ipc://${join(folder, "nobody")}`;
  await assert.rejects(Client.connect(address, { service: "longstep.env", version: 1, connectTimeoutS: 0.3 }), refused("DeadlineError", /got no answer/));
  await assert.rejects(serve({ name: "x", make: () => new Corridor(), address: "tcp://0.0.0.0:*" }), refused("ConfigError", /CURVE keys for tcp:\/\/0.0.0.0/));
  await server.stop();
});

test("a server that stops tells its clients, closes their environments and removes its socket", async () => {
  const { server, log } = await corridors();
  const envs = await RemoteEnvs.connect(server.address, { numSlots: 1 });
  await envs.reset(0);
  await server.stop();
  await assert.rejects(envs.step(0, "right"), (error: LongstepError) => error.kind === "SessionLostError");
  assert.match(readFileSync(log, "utf8"), /close/);
  assert.equal(existsSync(dirname(server.address.slice("ipc://".length))), false);
  await envs.close();
});

test("a silent client's environments are closed, a lively one's are kept", async () => {
  const { server, log } = await corridors({ heartbeatS: 0.1, lostAfterS: 1 });
  const peer = await RawPeer.ready(server.address);
  const client = await RemoteEnvs.connect(server.address, { numSlots: 1 });
  await client.reset(0);
  const end = performance.now() + 20_000;
  while (!readFileSync(log, "utf8").includes("close")) {
    assert.ok(performance.now() < end);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  await peer.tell(Kind.PING, 1, 2, []);
  assert.equal((await peer.hear())?.kind, Kind.LOST);
  assert.equal((await client.step(0, "right")).observation, "You stand at 1 of 9.");
  peer.close();
  await client.close();
  await server.stop();
});

const pythonAddress = process.env["LONGSTEP_PYTHON_AGENT"];
test("drives an agent environment of a Python server", { skip: pythonAddress === undefined && "LONGSTEP_PYTHON_AGENT is not set" }, async () => {
  const envs = await RemoteEnvs.connect(pythonAddress as string, { numSlots: 2 });
  assert.equal(envs.traits.kind, "agent");
  const [first, second] = await envs.run([0, 1].map((slot) => ({ slot, reset: { seed: 7 } })));
  assert.equal(first?.error, null);
  assert.equal(first?.observation, second?.observation);
  assert.deepEqual(first?.prompt?.messages.map(({ role }) => role), ["system", "user"]);
  assert.equal((first?.info["state_key"] as Uint8Array).byteLength, 16);
  const action = (first?.info["admissible_actions"] as string[])[0] as string;
  const results = await envs.run([{ slot: 0, action }, { slot: 1, action: "nonsense" }]);
  assert.deepEqual(results.map(({ info }) => info["action_valid"]), [true, false]);
  assert.equal(results[0]?.info["action"], action);
  await envs.close();
});

test("the messages of a session are in the schema of PROTOCOL.md", async () => {
  const { server } = await corridors();
  const peer = new RawPeer(server.address);
  await peer.tell(Kind.HELLO, { name: "schema", service: "longstep.env", service_version: 1 });
  const welcome = (await peer.hear())?.fields[0];
  const names = ["heartbeat_ms", "limits", "lost_after_ms", "methods", "num_credits", "pid", "service", "service_version"];
  assert.deepEqual(Object.keys(welcome).sort(), names);
  await peer.send([encode([2, 1, peer.token, {}])[0] as Uint8Array]);
  assert.deepEqual((await peer.hear())?.fields[0], "ProtocolError");
  await peer.request(1, "open", { environment: "other", num_slots: 1, owner: 1 });
  const heard = await peer.hear();
  assert.deepEqual(heard?.fields.slice(0, 2), [1, "RegistryError"]);
  await peer.request(2, "open", { environment: "js/Corridor-v0", num_slots: 1, owner: 1 });
  const traits = decode((await peer.hear())?.frames ?? []) as { [key: string]: Value };
  assert.equal(traits["can_copy"], true);
  peer.close();
  await server.stop();
});

test("a client whose key is allowed gets in and no other", async () => {
  const [own, friend, stranger] = [curveKeyPair(), curveKeyPair(), curveKeyPair()];
  const { server } = await corridors({ address: "tcp://0.0.0.0:*", keys: { ...own, allowed: [friend.publicKey] } });
  const address = server.address.replace("0.0.0.0", "127.0.0.1");
  const right = { ...friend, serverKey: own.publicKey };
  for (let round = 0; round < 2; round++) {
    const envs = await RemoteEnvs.connect(address, { numSlots: 1, keys: right });
    assert.equal((await envs.reset(0, { seed: 1 })).observation, "You stand at 1 of 9.");
    await envs.close();
    for (const keys of [{ ...stranger, serverKey: own.publicKey }, { ...friend, serverKey: stranger.publicKey }, undefined])
      await assert.rejects(
        RemoteEnvs.connect(address, { numSlots: 1, connectTimeoutS: 1, ...(keys && { keys }) }),
        refused("DeadlineError", /got no answer/),
      );
  }
  await server.stop();
});

const keyFolder = process.env["LONGSTEP_PYTHON_KEYS"];
test("drives a Python server that requires keys", { skip: keyFolder === undefined && "LONGSTEP_PYTHON_KEYS is not set" }, async () => {
  const [folder, address] = (keyFolder as string).split("|") as [string, string];
  const keys = { ...loadKeyPair(`${folder}/friend.key_secret`), serverKey: loadPublicKey(`${folder}/server.key`) };
  const envs = await RemoteEnvs.connect(address, { numSlots: 1, keys });
  assert.equal((await envs.reset(0, { seed: 7 })).error, null);
  await envs.close();
  assert.throws(() => loadKeyPair(`${folder}/friend.key`), refused("ConfigError", /got a public one/));
  assert.throws(() => loadPublicKey(`${folder}/nobody.key`), refused("ConfigError", /expected a key file/));
});
