/**
 * What the API answers, as JSDoc types; names as in its OpenAPI document.
 *
 * @typedef {"queued" | "starting" | "running" | "cancelling" | "succeeded" | "failed" | "cancelled"} JobState
 * @typedef {{done: number, total: number, unit: string, share?: number | null, phase?: string | null, left_s?: number | null}} Progress
 * @typedef {{name: string, began_at: string, seconds: number | null}} Phase
 * @typedef {{host: string, devices: number[], pool?: string}} HostShare
 * @typedef {{attempt: number, host: string, pool: string, devices: string[], threads: number | null, versions: Record<string, string>}} ComputedBy
 * @typedef {{type: string, message: string, rank?: number | null, traceback_artifact?: string | null, final?: boolean}} JobError
 *
 * @typedef {object} Job
 * @property {string} id
 * @property {string} kind
 * @property {string} name
 * @property {Record<string, string>} labels
 * @property {string} owner
 * @property {string} project
 * @property {JobState} state
 * @property {number} attempt
 * @property {number} priority
 * @property {string} created_at
 * @property {string | null} started_at
 * @property {string | null} ended_at
 * @property {Progress | null} progress
 * @property {Phase[]} [phases] what the newest attempt did one after the other; not in lists
 * @property {HostShare[]} placement
 * @property {string} launcher
 * @property {ComputedBy[]} [computed_by] what computed each attempt, the newest last
 * @property {string | null} reason
 * @property {Record<string, number> | null} parallel
 * @property {Record<string, any>} spec null in lists
 * @property {Record<string, any> | null} result
 * @property {JobError | null} error
 * @property {string | null} sweep the parent of a job that is one of a sweep
 * @property {Record<string, unknown> | null} parameters its swept fields, by dotted path
 * @property {SweepJobs | null} children of a parent
 *
 * @typedef {Record<JobState | "total", number> & {best: {job: string, value: number} | null}} SweepJobs
 *
 * @typedef {{at: string, rests_on: ("durations" | "limits" | "progress")[]}} StartEstimate
 * @typedef {{job: string, place: number | null, reason: string | null, start: StartEstimate | null}} QueueLine
 *
 * @typedef {object} Host
 * @property {string} name
 * @property {boolean} alive
 * @property {boolean} draining
 * @property {string} address
 * @property {string[]} cuda
 * @property {number} cpu_slots
 * @property {Record<string, number[]>} free
 * @property {string[]} running
 * @property {{job: string | null, attempt: number, pool: string, devices: number[], lost: boolean}[]} held
 * @property {{reason: string, since: string, failed_starts: number, retry_in_s: number} | null} failing
 * @property {{load: number, cores: number, by: {job: string | null, program: string, threads: number}[]} | null} overcommitted
 * @property {string} seen_at
 * @property {Record<string, string>} versions
 * @property {string[]} isolation
 * @property {Record<string, string>} launchers what each scheduler that its worker asks says of itself
 * @property {{launcher: string, id: string, job: string | null, pool: string, devices: number} | null} allocation
 *
 * @typedef {{name: string, bytes: number, sha256: string, media_type: string, created_at: string}} Artifact
 *
 * @typedef {object} BoundsRow
 * @property {number} instance
 * @property {string | null} [name] of the query in its archive
 * @property {number | null} [label] of a sample
 * @property {number | null} [prediction] the model's class for it
 * @property {"verified" | "falsified" | "unknown" | "timeout"} verdict
 * @property {(number | "-Infinity" | "Infinity" | null)[]} lower null in rows of older jobs, where a bound is not finite
 * @property {(number | "-Infinity" | "Infinity" | null)[]} upper
 * @property {number | null} margin
 * @property {string} method
 * @property {string | null} [decided_by]
 * @property {string | null} [reason] why it is undecided
 * @property {string | null} [note] what else is to be known of the bounds
 * @property {number} seconds
 * @property {number} domains
 * @property {number[] | null} counterexample
 * @property {(number | null)[] | null} [counterexample_outputs] in float64; null where one is not finite
 * @property {(number | null)[] | null} [onnxruntime_outputs] of a model from ONNX
 * @property {number[] | null} [sample] the labelled one around which the counterexample was found
 * @property {(number | null)[] | null} [sample_outputs] of the model for it
 *
 * @typedef {{type: string, time: number, rank: number | null} & Record<string, any>} JobEvent
 * @typedef {{id: string, job: string | null, event: JobEvent}} StreamedEvent
 */

export {};
