// Where the nodes of a graph stand, found by ELK in a worker that only Lineage loads.
import ELK, { type ElkNode } from "elkjs/lib/elk-api.js";
import workerUrl from "elkjs/lib/elk-worker.min.js?url";
import type { Folded } from "./fold";

export const NODE_WIDTH = 168;
export const NODE_HEIGHT = 46;

export type Places = Map<string, { x: number; y: number }>;

const OPTIONS = {
  "elk.algorithm": "layered",
  "elk.direction": "RIGHT",
  "elk.layered.spacing.nodeNodeBetweenLayers": "48",
  "elk.spacing.nodeNode": "18",
  "elk.spacing.componentComponent": "32",
  "elk.layered.nodePlacement.strategy": "NETWORK_SIMPLEX",
  "elk.layered.considerModelOrder.strategy": "NODES_AND_EDGES",
};
// Beyond this many nodes the exact placement takes too long; a simpler one is still legible.
const EXACT_MAX = 400;

let elk: InstanceType<typeof ELK> | null = null;

/** Places for all nodes. Rejects when the worker cannot be loaded. */
export async function layOut({ nodes, edges }: Folded): Promise<Places> {
  elk ??= new ELK({ workerUrl });
  const there = new Set(nodes.map((node) => node.id));
  const strategy = nodes.length > EXACT_MAX
    ? { "elk.layered.nodePlacement.strategy": "BRANDES_KOEPF" } : {};
  const graph: ElkNode = {
    id: "root",
    layoutOptions: { ...OPTIONS, ...strategy },
    children: nodes.map((node) => ({ id: node.id, width: NODE_WIDTH, height: NODE_HEIGHT })),
    edges: edges
      .filter((edge) => there.has(edge.from) && there.has(edge.to))
      .map((edge, index) => ({ id: `e${index}`, sources: [edge.from], targets: [edge.to] })),
  };
  const placed = await elk.layout(graph);
  return new Map((placed.children ?? []).map(({ id, x = 0, y = 0 }) => [id, { x, y }]));
}
