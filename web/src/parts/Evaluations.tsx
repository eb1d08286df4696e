// What is known about the quality of a checkpoint: its metrics, and the consumers that used it.
import type { ReactNode } from "react";
import type { CheckpointDetail } from "../api/types";
import { figure } from "../format";
import { plain } from "../states";

/** The metrics of a checkpoint, and the state of each consumer, such as an evaluation. */
export const evaluationsOf = ({ metrics, consumers }: CheckpointDetail): [string, ReactNode][] => [
  ...Object.entries(metrics).map(([name, value]): [string, ReactNode] =>
    [plain(name), typeof value === "number" ? figure(value) : String(value)]),
  ...consumers.map((one): [string, ReactNode] =>
    [one.name, one.reason ? `${plain(one.state)}: ${one.reason}` : plain(one.state)]),
];
