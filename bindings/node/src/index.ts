/** longstep for JavaScript: serve an environment (`serve`), or drive those of a server (`RemoteEnvs`). */

export { loadKeyPair, loadPublicKey } from "./curve.js";
export type { ClientKeys, KeyPair, ServerKeys } from "./curve.js";
export { serve } from "./environments.js";
export type { Environment, EnvironmentOptions, Info, ResetResult, Start, StepResult } from "./environments.js";
export { LongstepError, ProtocolError } from "./errors.js";
export { RemoteEnvs } from "./remote.js";
export type { Command, EnvResult, Prompt, RemoteOptions, Traits } from "./remote.js";
export type { Server, ServerOptions } from "./server.js";
export { FrozenSet, NDArray, Tuple } from "./values.js";
export type { TypedArray, Value } from "./values.js";
