// The lineage of a run: checkpoints, attempts, resizes, rollbacks, forks and exports.
import {
  Background, BaseEdge, Controls, Handle, Position, ReactFlow, ReactFlowProvider, useReactFlow,
  type Edge, type EdgeProps, type Node, type NodeProps,
} from "@xyflow/react";
import "@xyflow/react/dist/style.css";
import { Link, useNavigate, useParams, useSearch } from "@tanstack/react-router";
import {
  useCallback, useEffect, useMemo, useReducer, useState, type KeyboardEvent,
} from "react";
import { useCheckpoint, useGraph } from "../../api/queries";
import type { GraphEdge } from "../../api/types";
import { drawn, isFold, isIn, type Fold, type Folded, type Shown } from "../../fold";
import { bytes, count } from "../../format";
import { cardTowards } from "../../keyboard";
import { layOut, NODE_HEIGHT, NODE_WIDTH, type Layout, type Point } from "../../layout";
import { evaluationsOf } from "../../parts/Evaluations";
import { Empty, Facts, Loaded, Problem, Shape, Time } from "../../parts/basics";
import { CheckpointTags, Note } from "../../parts/Tags";
import { StageIcon, StageLegend, StageLine } from "../../parts/Durability";
import { stageOfNode } from "../../durability";
import { plain } from "../../states";

type GraphNodeType = Node<{ shown: Shown; selected: boolean; isDown: boolean }, "shown">;

const numberIn = (id: string): number => Number(/:\D+(\d+)/.exec(id)?.[1]);

const WORDS: Record<string, string> = {
  resumed_from: "resumed", forked_from: "forked", rolled_back: "rolled back to",
  exported_to: "exported", imported_from: "imported",
  consumed_by: "used by",
};

function title(shown: Shown): string {
  if (isFold(shown)) return `${count(shown.count)} checkpoints`;
  // For a node of another run, only the id may be known.
  if (shown.kind === "attempt") return `attempt ${shown.number ?? numberIn(shown.id)}`;
  if (shown.kind === "checkpoint") return `step ${count(shown.step ?? numberIn(shown.id))}`;
  if (shown.kind === "consumer") return shown.consumer ?? shown.id;
  return shown.id.length > 22 ? `…${shown.id.slice(-21)}` : shown.id;
}

function subtitle(shown: Shown, run: string): string {
  if (isFold(shown)) return `steps ${count(shown.first_step)} – ${count(shown.last_step)}; expand`;
  const facts = [
    shown.kind !== "run" && shown.run && shown.run !== run ? shown.run : null,
    shown.kind === "checkpoint" && shown.state ? stageOfNode(shown) : null,
    shown.pinned ? "pinned" : null,
    shown.rolled_back ? "rolled back" : null,
    shown.cause ? plain(shown.cause) : null,
    shown.world_size ? `${shown.world_size} rank${shown.world_size === 1 ? "" : "s"}` : null,
    shown.kind === "export" ? "export" : null,
    shown.kind === "consumer" && shown.state ? plain(shown.state) : null,
    shown.kind === "source" ? "imported weights" : null,
    shown.kind === "run" ? "run" : null,
    shown.kind === "run" && shown.state ? plain(shown.state) : null,
  ];
  return facts.filter(Boolean).join(" · ");
}

function GraphCard({ data: { shown, selected, isDown } }: NodeProps<GraphNodeType>) {
  const { run } = useParams({ from: "/runs/$run" });
  const gone = shown.state === "deleted" || shown.rolled_back;
  const classes = [
    "graph-node", `kind-${shown.kind}`, selected && "is-selected", gone && "is-gone",
  ];
  return (
    <div className={classes.filter(Boolean).join(" ")} title={shown.id}>
      <Handle type="target" position={isDown ? Position.Top : Position.Left}
        isConnectable={false} />
      <span className="state">
        {isSaved(shown) ? <StageIcon stage={stageOfNode(shown)} mirrored={shown.mirrored} />
          : shown.state ? <Shape state={shown.state} /> : null}
        <b>{title(shown)}</b>
      </span>
      <small>{subtitle(shown, run)}</small>
      <Handle type="source" position={isDown ? Position.Bottom : Position.Right}
        isConnectable={false} />
    </div>
  );
}

const isSaved = (shown: Shown): boolean =>
  shown.state !== undefined && (isFold(shown) || shown.kind === "checkpoint");

// The canvas is as wide as the page, and takes this share of the window's height.
const PAGE_WIDTH = 1600;
const EDGE = 40;
const CANVAS_SHARE = 0.66;
const CANVAS_MIN = 320;
const NARROW_PX = 640;
const CORNER = 10;
// Edges to the next row turn on the left of the cards.
const PADDING = { left: "80px", right: "40px", y: "24px" } as const;
const FIT = { padding: PADDING, maxZoom: 1, minZoom: 0.5 };
// More cards than these are not readable at once, so the newest are shown first.
const SEEN_MAX = 80;
const SEEN_DOWN = 12;

// A card that is not drawn by then will not be.
const DRAWN_MS = 2000;

// The most folds that the server opens; the oldest is closed then.
const OPEN_MAX = 50;

const NODE_TYPES = { shown: GraphCard };

type WayEdge = Edge<{ way: Point[] }, "way">;

/** A path through points, with round corners. */
function pathOf(way: Point[]): string {
  return way.map((at, index) => {
    const [before, after] = [way[index - 1], way[index + 1]];
    if (!before) return `M${at.x} ${at.y}`;
    if (!after) return `L${at.x} ${at.y}`;
    const toward = (to: Point) => {
      const length = Math.hypot(to.x - at.x, to.y - at.y) || 1;
      const share = Math.min(CORNER, length / 2) / length;
      return `${at.x + (to.x - at.x) * share} ${at.y + (to.y - at.y) * share}`;
    };
    return `L${toward(before)}Q${at.x} ${at.y} ${toward(after)}`;
  }).join("");
}

/** An edge along the path from the layout. */
function Way({ data, label, labelStyle }: EdgeProps<WayEdge>) {
  const way = data?.way ?? [];
  const [end, last] = [way.at(-2), way.at(-1)];
  const labelled = end && last
    ? { labelX: (end.x + last.x) / 2, labelY: (end.y + last.y) / 2 } : {};
  return (
    <BaseEdge path={pathOf(way)} label={label} labelStyle={labelStyle}
      labelBgPadding={[2, 1]} {...labelled} />
  );
}

const EDGE_TYPES = { way: Way };

/** An edge. One to the next row follows the path from the layout. */
function drawEdge({ from, to, kind }: GraphEdge, index: number, layout: Layout): Edge {
  const { places, ways, isDown } = layout;
  const isBack = !isDown && (places.get(to)?.x ?? 0) <= (places.get(from)?.x ?? 0);
  const way = ways.get(index);
  const drawn: Edge = {
    id: `${index}:${from}→${to}`,
    source: from,
    target: to,
    className: `edge-${kind}`,
    focusable: false,
  };
  if (isBack && way) Object.assign(drawn, { type: "way", data: { way } });
  return WORDS[kind] ? { ...drawn, label: WORDS[kind], labelBgPadding: [2, 1] } : drawn;
}

/** The expected width of the canvas divided by its height; null if the graph goes down. */
function aspect(): number | null {
  if (window.innerWidth < NARROW_PX) return null;
  const width = Math.min(window.innerWidth, PAGE_WIDTH) - EDGE;
  return width / Math.max(CANVAS_MIN, window.innerHeight * CANVAS_SHARE);
}

/** The height of the canvas for this layout, limited by the window. */
function heightOf({ places }: Layout): number {
  const bottom = Math.max(0, ...[...places.values()].map(({ y }) => y));
  const most = Math.max(CANVAS_MIN, window.innerHeight * CANVAS_SHARE);
  return Math.min(most, Math.max(CANVAS_MIN, bottom + NODE_HEIGHT + 2 * EDGE));
}

/** The layout of the graph. The old one stays until the new one is ready. */
function useLayout(folded: Folded) {
  const [[layout, placed], setPlaced] = useState<[Layout | null, Folded]>([null, folded]);
  const [error, setError] = useState<unknown>(null);
  const [tries, retry] = useReducer((count: number) => count + 1, 0);
  useEffect(() => {
    let current = true;
    layOut(folded, aspect()).then(
      (found) => {
        if (!current) return;
        setPlaced([found, folded]);
        setError(null);
      },
      (reason: unknown) => current && setError(reason),
    );
    return () => {
      current = false;
    };
  }, [folded, tries]);
  return { layout, placed, error, retry };
}

function Details({ id }: { id: string }) {
  const query = useCheckpoint(id);
  return (
    <aside className="panel" aria-label="Selected checkpoint">
      <Loaded query={query}>
        {(one) => (
          <>
            <h2>Step {count(one.step)}</h2>
            <StageLine one={one} />
            <Facts
              facts={[
                ["Retention", one.reason],
                ["Attempt", `${one.attempt}.${one.launch}`],
                ["Ranks", count(one.world_size)],
                ["Size", bytes(one.bytes)],
                ["Deleted", one.deleted_at ? <Time at={one.deleted_at} /> : null],
                ...evaluationsOf(one),
              ]}
            />
            <CheckpointTags tags={one.tags} />
            <Note of={one} />
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

/** The newest cards of a graph with too many cards, or all. */
function seenFirst(nodes: GraphNodeType[], { isDown }: Layout): { id: string }[] {
  const most = isDown ? SEEN_DOWN : SEEN_MAX;
  if (nodes.length <= most) return nodes;
  const step = ({ data: { shown } }: GraphNodeType) =>
    isFold(shown) ? shown.last_step : (shown.step ?? 0);
  return nodes.toSorted((one, other) => step(other) - step(one)).slice(0, most / 2);
}

/** Focuses a card. The library draws only what is visible, so the view moves there first. */
function focusCard(
  graph: HTMLElement, id: string, place: Point | undefined,
  flow: ReturnType<typeof useReactFlow>,
) {
  const card = () => graph.querySelector<HTMLElement>(`[data-id="${CSS.escape(id)}"]`);
  const known = card();
  if (known) {
    known.focus({ preventScroll: true });
    return;
  }
  if (!place) return;
  void flow.setCenter(place.x + NODE_WIDTH / 2, place.y + NODE_HEIGHT / 2,
    { zoom: flow.getZoom() });
  const watch = new MutationObserver(() => {
    const drawn = card();
    if (!drawn) return;
    watch.disconnect();
    drawn.focus({ preventScroll: true });
  });
  watch.observe(graph, { subtree: true, childList: true });
  setTimeout(() => watch.disconnect(), DRAWN_MS);
}

interface CanvasProps {
  run: string;
  folded: Folded;
  opened: Fold | null;
  at: string | undefined;
  choose: (node: Shown) => void;
}

function Canvas({ run, folded, opened, at, choose }: CanvasProps) {
  const { layout, placed, error, retry } = useLayout(folded);
  const places = layout?.places;
  const nodes = useMemo(
    () => placed.nodes.flatMap((shown): GraphNodeType[] => {
      const position = places?.get(shown.id);
      if (!position) return [];
      const words = `${shown.kind} ${title(shown)}, ${subtitle(shown, run)}`;
      const data = { shown, selected: shown.id === at, isDown: layout?.isDown ?? false };
      return [{ id: shown.id, type: "shown", position, ariaLabel: words, data }];
    }),
    [placed, layout, places, at, run],
  );
  const edges = useMemo(
    () => (layout ? placed.edges.map((edge, index) => drawEdge(edge, index, layout)) : []),
    [placed, layout],
  );
  const flow = useReactFlow();
  useEffect(() => {
    // Move the view to the fold that was just expanded.
    if (!opened) return;
    const there = placed.nodes.filter((one) => places?.has(one.id) && isIn(one, opened));
    if (there.length > 0) void flow.fitView({ ...FIT, nodes: there });
  }, [places, placed, opened, flow]);
  const press = (event: KeyboardEvent<HTMLDivElement>) => {
    const card = (event.target as HTMLElement).closest<HTMLElement>(".react-flow__node");
    const shown = placed.nodes.find((one) => one.id === card?.dataset.id);
    if (!shown || !places) return;
    const next = cardTowards(places, shown.id, event.key);
    if (next !== undefined) focusCard(event.currentTarget, next, places.get(next), flow);
    // For these keys, the library selects a card but does not report a click.
    else if (event.key === "Enter" || event.key === " ") choose(shown);
    else return;
    event.preventDefault();
  };
  const failed = error ? (
    <>
      <Problem error={error} />
      <p><button type="button" onClick={retry}>Retry</button></p>
    </>
  ) : null;
  if (!layout && failed) return failed;
  if (!layout) return <p className="loading" role="status">Laying out the graph…</p>;
  return (
    <>
    {failed}
    <div className="graph" style={{ height: heightOf(layout) }} onKeyDown={press}>
      <ReactFlow
        nodes={nodes}
        edges={edges}
        nodeTypes={NODE_TYPES}
        edgeTypes={EDGE_TYPES}
        nodesDraggable={false}
        nodesConnectable={false}
        elementsSelectable
        onlyRenderVisibleElements
        fitView
        minZoom={0.02}
        maxZoom={1.6}
        fitViewOptions={{ ...FIT, nodes: seenFirst(nodes, layout) }}
        onNodeClick={(_, node) => choose(node.data.shown)}
        proOptions={{ hideAttribution: false }}
      >
        <Background />
        <Controls position="top-right" showInteractive={false} />
      </ReactFlow>
    </div>
    </>
  );
}

export function Lineage() {
  const { run } = useParams({ from: "/runs/$run" });
  const { at } = useSearch({ from: "/runs/$run/lineage" });
  const navigate = useNavigate({ from: "/runs/$run/lineage" });
  const [open, setOpen] = useState<string[]>([]);
  const [opened, setOpened] = useState<Fold | null>(null);
  const query = useGraph(run, open);
  const folded = useMemo(() => query.data && drawn(query.data), [query.data]);
  const choose = useCallback(
    (node: Shown) => {
      if (isFold(node)) {
        setOpen((old) => [...old, node.id].slice(-OPEN_MAX));
        setOpened(node);
      } else if (node.kind === "checkpoint" && node.state !== "staged") {
        void navigate({ search: { at: node.id } });
      } else if (node.kind === "run" && node.run) {
        void navigate({ to: "/runs/$run", params: { run: node.run } });
      }
    },
    [navigate],
  );
  const foldAll = () => {
    setOpen([]);
    setOpened(null);
  };
  return (
    <Loaded query={query}>
      {(graph) => graph.nodes.length < 2 || !folded ? (
        <Empty title="No lineage yet"><p>The lineage starts with the first attempt.</p></Empty>
      ) : (
        <>
          <div className="toolbar">
            <span className="muted">
              {count(graph.nodes_total ?? graph.nodes.length)} nodes,{" "}
              {count(folded.nodes.length)} shown. A dashed card
              contains checkpoints without events. Click it or press Enter to expand it.
            </span>
            {open.length > 0 ? (
              <button type="button" onClick={foldAll}>Collapse all</button>
            ) : null}
          </div>
          <StageLegend />
          <div className={at ? "split" : undefined}>
            <ReactFlowProvider>
              <Canvas run={run} folded={folded} opened={opened} at={at} choose={choose} />
            </ReactFlowProvider>
            {at ? <Details id={at} /> : null}
          </div>
        </>
      )}
    </Loaded>
  );
}
