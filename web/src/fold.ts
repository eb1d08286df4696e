// The lineage as it is drawn: its edges in the order of time. The server folds long chains of
// checkpoints into one node each. Pure functions.
import type { Graph, GraphEdge, GraphNode } from "./api/types";

export interface Fold extends GraphNode {
  kind: "fold";
  count: number;
  first_step: number;
  last_step: number;
}

export type Shown = GraphNode | Fold;
export const isFold = (node: Shown): node is Fold => node.kind === "fold";

const ID = /^(.*):step-\d+\.a(\d+)\.l(\d+)$/;
const ATTEMPT = /^(.*):attempt-(\d+)$/;

/** (run, attempt, launch) from the id of a checkpoint or, without a launch, of an attempt. */
function originOf(id: string): [string, number, number] | null {
  const found = ID.exec(id) ?? ATTEMPT.exec(id);
  return found ? [found[1] ?? "", Number(found[2]), Number(found[3] ?? 0)] : null;
}

/** Whether an attempt resumed from its own checkpoint. */
function isInPlace({ from, to, kind }: GraphEdge): boolean {
  if (kind !== "resumed_from") return false;
  const [one, other] = [originOf(from), originOf(to)];
  return one !== null && other !== null && one[0] === other[0] && one[1] === other[1];
}

/** The edges, in which a restart in place leads from the checkpoint to the first one of the new
    launch. An edge from the attempt, which wrote both, would close a cycle. */
function withoutCycles(edges: GraphEdge[]): GraphEdge[] {
  const restarted = new Set(edges.filter(isInPlace).map((edge) => edge.to));
  return edges.filter((edge) => !isInPlace(edge)).map((edge) => {
    if (edge.kind !== "parent" || !restarted.has(edge.to)) return edge;
    const [child, parent] = [originOf(edge.from), originOf(edge.to)];
    const isNext = child && parent && child[1] === parent[1] && child[2] > parent[2];
    return isNext ? { ...edge, kind: "resumed_from" } : edge;
  });
}

/** The edges with `from` before `to` in time, and edges from attempts to their first checkpoint. */
export function inTime({ nodes, edges }: Graph): GraphEdge[] {
  const found = withoutCycles(edges).map((edge) =>
    edge.kind === "exported_to" || edge.kind === "rolled_back"
      ? edge
      : { from: edge.to, to: edge.from, kind: edge.kind },
  );
  const attempts = new Map(
    nodes.filter((one) => one.kind === "attempt").map((one) => [`${one.run}/${one.number}`, one]),
  );
  const firsts = new Map<string, GraphNode>();
  for (const node of nodes) {
    const match = node.kind === "checkpoint" ? ID.exec(node.id) : null;
    if (!match) continue;
    const key = `${match[1]}/${Number(match[2])}`;
    const before = firsts.get(key);
    if (!before || (node.step ?? 0) < (before.step ?? 0)) firsts.set(key, node);
  }
  const reached = new Set(found.map((edge) => edge.to));
  for (const [key, attempt] of attempts) {
    const first = firsts.get(key);
    if (first) found.push({ from: attempt.id, to: first.id, kind: "made" });
    const run = nodes.find((one) => one.kind === "run" && one.run === attempt.run);
    if (run && !reached.has(attempt.id)) found.push({ from: run.id, to: attempt.id, kind: "made" });
  }
  return found;
}

export interface Folded {
  nodes: Shown[];
  edges: GraphEdge[];
}

/** The graph with its edges in the order of time, each of them once. */
export function drawn(graph: Graph): Folded {
  const seen = new Set<string>();
  const edges = inTime(graph).filter(({ from, to, kind }) => {
    const key = `${from}|${to}|${kind}`;
    if (from === to || seen.has(key)) return false;
    seen.add(key);
    return true;
  });
  return { nodes: graph.nodes, edges };
}

/** Whether a node is what an opened fold contained, or a part of it. */
export function isIn(node: Shown, { run, first_step: first, last_step: last, rolled_back }: Fold) {
  if (node.run !== run || node.rolled_back !== rolled_back) return false;
  if (isFold(node)) return node.first_step >= first && node.last_step <= last;
  return node.kind === "checkpoint" && node.step !== undefined && node.step >= first
    && node.step <= last;
}
