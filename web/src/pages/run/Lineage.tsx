// The graph of a run's checkpoints over attempts, resizes, rollbacks, forks and exports.
import {
  Background, Controls, Handle, Position, ReactFlow, ReactFlowProvider, type Edge, type Node,
  type NodeProps,
} from "@xyflow/react";
import "@xyflow/react/dist/style.css";
import { Link, useNavigate, useParams, useSearch } from "@tanstack/react-router";
import { useCallback, useEffect, useMemo, useState } from "react";
import { useCheckpoint, useGraph } from "../../api/queries";
import type { GraphEdge } from "../../api/types";
import { fold, isFold, type Folded, type Shown } from "../../fold";
import { bytes, count } from "../../format";
import { layOut, type Places } from "../../layout";
import { Empty, Facts, Loaded, Problem, Shape, Time } from "../../parts/basics";
import { StageIcon, StageLegend, StageLine } from "../../parts/Stages";
import { stageOfNode } from "../../stages";
import { plain } from "../../states";

type GraphNodeType = Node<{ shown: Shown; selected: boolean }, "shown">;

const WORDS: Record<string, string> = {
  resumed_from: "resumed", forked_from: "forked", rolled_back: "rolled back to",
  exported_to: "exported",
};

function title(shown: Shown): string {
  if (isFold(shown)) return `${count(shown.members.length)} checkpoints`;
  if (shown.kind === "attempt") return `attempt ${shown.number}`;
  if (shown.kind === "checkpoint") return `step ${count(shown.step)}`;
  return shown.id.length > 22 ? `…${shown.id.slice(-21)}` : shown.id;
}

function subtitle(shown: Shown): string {
  if (isFold(shown)) return `steps ${count(shown.first_step)} – ${count(shown.last_step)}; open`;
  const told = [
    shown.kind === "checkpoint" && shown.state ? stageOfNode(shown) : null,
    shown.pinned ? "pinned" : null,
    shown.rolled_back ? "rolled back" : null,
    shown.cause ? plain(shown.cause) : null,
    shown.world_size ? `${shown.world_size} GPU${shown.world_size === 1 ? "" : "s"}` : null,
    shown.kind === "export" ? "export" : null,
    shown.kind === "run" ? "run" : null,
    shown.kind === "run" && shown.state ? plain(shown.state) : null,
  ];
  return told.filter(Boolean).join(" · ");
}

function GraphCard({ data: { shown, selected } }: NodeProps<GraphNodeType>) {
  const gone = shown.state === "deleted" || shown.rolled_back;
  const classes = [
    "graph-node", `kind-${shown.kind}`, selected && "is-selected", gone && "is-gone",
  ];
  return (
    <div className={classes.filter(Boolean).join(" ")} title={shown.id}>
      <Handle type="target" position={Position.Left} isConnectable={false} />
      <span className="state">
        {isSaved(shown) ? <StageIcon stage={stageOfNode(shown)} mirrored={shown.mirrored} />
          : shown.state ? <Shape state={shown.state} /> : null}
        <b>{title(shown)}</b>
      </span>
      <small>{subtitle(shown)}</small>
      <Handle type="source" position={Position.Right} isConnectable={false} />
    </div>
  );
}

const isSaved = (shown: Shown): boolean =>
  shown.state !== undefined && (isFold(shown) || shown.kind === "checkpoint");

const NODE_TYPES = { shown: GraphCard };

const drawEdge = ({ from, to, kind }: GraphEdge, index: number): Edge => ({
  id: `${index}:${from}→${to}`,
  source: from,
  target: to,
  label: WORDS[kind],
  className: `edge-${kind}`,
  focusable: false,
});

/** Places for what is shown; the old ones stay until the new are found. */
function usePlaces(folded: Folded): [Places | null, Folded, unknown] {
  const [placed, setPlaced] = useState<[Places | null, Folded]>([null, folded]);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => {
    let current = true;
    layOut(folded).then(
      (places) => current && setPlaced([places, folded]),
      (reason: unknown) => current && setError(reason),
    );
    return () => {
      current = false;
    };
  }, [folded]);
  return [...placed, error];
}

function Details({ id }: { id: string }) {
  const query = useCheckpoint(id);
  return (
    <aside className="panel" aria-label="The chosen checkpoint">
      <Loaded query={query}>
        {(one) => (
          <>
            <h2>Step {count(one.step)}</h2>
            <StageLine one={one} />
            <Facts
              facts={[
                ["Why", one.reason],
                ["Attempt", `${one.attempt}.${one.incarnation}`],
                ["GPUs", count(one.world_size)],
                ["Size", bytes(one.bytes)],
                ["Deleted", one.deleted_at ? <Time at={one.deleted_at} /> : null],
              ]}
            />
            <p>
              <Link to="/checkpoints/$id" params={{ id }}>
                Shards, digests and commands of this checkpoint
              </Link>
            </p>
          </>
        )}
      </Loaded>
    </aside>
  );
}

interface CanvasProps {
  folded: Folded;
  at: string | undefined;
  choose: (node: Shown) => void;
}

function Canvas({ folded, at, choose }: CanvasProps) {
  const [places, placed, error] = usePlaces(folded);
  const nodes = useMemo(
    () => placed.nodes.flatMap((shown): GraphNodeType[] => {
      const position = places?.get(shown.id);
      if (!position) return [];
      const words = `${shown.kind} ${title(shown)}, ${shown.state ?? ""} ${subtitle(shown)}`;
      return [{ id: shown.id, type: "shown", position, ariaLabel: words,
        data: { shown, selected: shown.id === at } }];
    }),
    [placed, places, at],
  );
  const edges = useMemo(() => placed.edges.map(drawEdge), [placed]);
  if (error) return <Problem error={error} />;
  if (!places) return <p className="loading" role="status">Finding places for the nodes…</p>;
  return (
    <div className="graph">
      <ReactFlow
        nodes={nodes}
        edges={edges}
        nodeTypes={NODE_TYPES}
        nodesDraggable={false}
        nodesConnectable={false}
        elementsSelectable
        onlyRenderVisibleElements
        fitView
        minZoom={0.02}
        maxZoom={1.6}
        fitViewOptions={{ maxZoom: 1 }}
        onNodeClick={(_, node) => choose(node.data.shown)}
        proOptions={{ hideAttribution: false }}
      >
        <Background />
        <Controls showInteractive={false} />
      </ReactFlow>
    </div>
  );
}

export function Lineage() {
  const { run } = useParams({ from: "/runs/$run" });
  const { at } = useSearch({ from: "/runs/$run/lineage" });
  const navigate = useNavigate({ from: "/runs/$run/lineage" });
  const query = useGraph(run);
  const [open, setOpen] = useState<ReadonlySet<string>>(new Set());
  const folded = useMemo(() => (query.data ? fold(query.data, open) : null), [query.data, open]);
  const choose = useCallback(
    (node: Shown) => {
      if (isFold(node)) setOpen((old) => new Set([...old, node.id]));
      else if (node.kind === "checkpoint" && node.state !== "staged") {
        void navigate({ search: { at: node.id } });
      } else if (node.kind === "run" && node.run) {
        void navigate({ to: "/runs/$run", params: { run: node.run } });
      }
    },
    [navigate],
  );
  return (
    <Loaded query={query}>
      {(graph) => graph.nodes.length < 2 || !folded ? (
        <Empty title="No lineage yet"><p>It begins with the first attempt.</p></Empty>
      ) : (
        <>
          <div className="toolbar">
            <span className="muted">
              {count(graph.nodes.length)} nodes, {count(folded.nodes.length)} shown. A dashed card
              is a stretch in which nothing happened; open it with a click.
            </span>
            {open.size > 0 ? (
              <button type="button" onClick={() => setOpen(new Set())}>Fold all</button>
            ) : null}
          </div>
          <StageLegend />
          <div className={at ? "split" : undefined}>
            <ReactFlowProvider>
              <Canvas folded={folded} at={at} choose={choose} />
            </ReactFlowProvider>
            {at ? <Details id={at} /> : null}
          </div>
        </>
      )}
    </Loaded>
  );
}
