// What an order costs beside the run's own steps, and what becomes of it after it was given.
import { useCapacity, useRun } from "../api/queries";
import type { Run } from "../api/types";
import { count } from "../format";
import { State } from "./basics";

const LOOKS: Record<string, string> = {
  pending: "waiting", taken: "running", done: "completed", failed: "failed", overtaken: "cancelled",
};

/** The number of the run's newest order; 0 before the first one. */
export const newestOrder = (run: Run): number => Math.max(0, ...run.requests.map((o) => o.number));

/** The state of the first order after `after`, which changes while the dialog is open. */
export function OrderState({ name, after }: { name: string; after: number }) {
  const run = useRun(name).data;
  const order = run?.requests.find((one) => one.number > after);
  if (!order) return null;
  return (
    <p className="second">
      <State state={LOOKS[order.state] ?? "waiting"}>
        Order {order.number} ({order.action} by {order.by}): {order.state}
      </State>
      {order.detail ? <span className="muted breaks"> {order.detail}</span> : null}
    </p>
  );
}

/** The GPUs that the scheduler says are free now; nothing if they are not limited. */
export function FreeGpus({ name }: { name: string }) {
  const { data, isLoading } = useCapacity(name);
  if (isLoading) return <p className="muted">Asking for free GPUs…</p>;
  if (data?.problem) return <p className="muted breaks">Free GPUs are unknown: {data.problem}.</p>;
  if (data?.gpus_free == null) return null;
  return (
    <p>
      Free now: {count(data.gpus_free)} GPU{data.gpus_free === 1 ? "" : "s"} ({data.where}).
    </p>
  );
}
