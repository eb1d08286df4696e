// What needs a person, on top of the list of runs: grouped by kind, with who acknowledged it.
import { useDialogStore } from "@ariakit/react";
import { Link } from "@tanstack/react-router";
import { useState } from "react";
import { useAttention } from "../api/queries";
import { useMayAct } from "../api/session";
import type { AttentionItem } from "../api/types";
import { count } from "../format";
import { plain } from "../states";
import { Said, State, Time } from "./basics";
import { ActionDialog, type Action } from "./Confirm";

/** So many problems of one kind are shown one by one; more are folded into a line. */
const SAME_OPEN_MAX = 3;

/** The names of the kinds in the list of runs. */
export const KIND_WORDS: Record<string, string> = {
  unsupervised: "no supervisor", silent: "no heartbeats", saves_fail: "saves fail",
  checkpoint_old: "checkpoint too old", node_silent: "silent node", pending_long: "long pending",
  waiting_long: "long waiting", metric_missing: "metric missing", node_slow: "slow node",
  link_slow: "slow link", spares_used: "no spare node left",
  storage_full: "storage full", budget_spent: "budget nearly spent",
};

export const kindWords = (kind: string): string => KIND_WORDS[kind] ?? plain(kind);

const toneOf = (item: AttentionItem): string => (item.level === "bad" ? "silent" : "stopping");

/** The problems that are named beside a run's state: the urgent ones, and a dead agent. */
export function Problems({ uid }: { uid: string }) {
  const found = useAttention().data?.filter((one) =>
    one.uid === uid && (one.level === "bad" || one.kind === "silent"));
  // Several nodes of one run may be silent.
  const kinds = new Map(found?.map((one) => [one.kind, one.text]));
  return [...kinds].map(([kind, text]) => (
    <div key={kind} title={text}><State state="silent">{kindWords(kind)}</State></div>
  ));
}

/** Whose acknowledgement counts. It may be another one than the reader's, and so may the note. */
function Acknowledged({ done }: { done: AttentionItem["acknowledged"] }) {
  if (!done) return "Acknowledged.";
  return (
    <>
      Acknowledged by <bdi>{done.by}</bdi>{done.note ? <>: <bdi>{done.note}</bdi></> : null}. Only
      the first acknowledgement counts.
    </>
  );
}

function acknowledgeOf(item: AttentionItem): Action {
  return {
    word: "Acknowledge",
    title: `Acknowledge: ${kindWords(item.kind)}`,
    path: "/attention/acknowledge",
    body: { id: item.id },
    field: { name: "note", label: "Note for others (optional)", type: "text", initial: "" },
    explanation: (
      <p className="breaks">
        {item.run ? `${item.run}: ` : ""}{item.text}. Everyone sees that you acknowledged it. It
        moves to the end of the list until it is solved.
      </p>
    ),
    done: (answer) => <Acknowledged done={(answer as unknown as AttentionItem).acknowledged} />,
  };
}

function Help({ item }: { item: AttentionItem }) {
  return (
    <div className="second muted">
      What helps: <Said text={item.action} />.
      {item.kind === "storage_full" ? <>{" "}<Link to="/storage">Open Storage</Link></> : null}
    </div>
  );
}

/** Opens the dialog of an item; null if the reader may not act. */
type Ask = ((item: AttentionItem) => void) | null;

function Line({ item, ask }: { item: AttentionItem; ask: Ask }) {
  const { acknowledged: done } = item;
  return (
    <li>
      <State state={done ? "waiting" : toneOf(item)}>{kindWords(item.kind)}</State>
      <div className="breaks">
        {item.run ? (
          <><Link to="/runs/$run" params={{ run: item.run }}><strong>{item.run}</strong></Link>: </>
        ) : null}
        {item.text}
        {item.since ? <span className="muted"> · <Time at={item.since} /></span> : null}
        {done ? (
          <div className="second muted">
            Acknowledged by <bdi>{done.by}</bdi>, <Time at={done.at} />
            {done.note ? <>: <bdi>{done.note}</bdi></> : null}
          </div>
        ) : <Help item={item} />}
      </div>
      {ask && !done ? (
        <button type="button" onClick={() => ask(item)}
          aria-label={`Acknowledge ${kindWords(item.kind)} of ${item.run ?? "the storage"}`}>
          Acknowledge
        </button>
      ) : <span />}
    </li>
  );
}

/** The items of each kind and level, in the server's order. */
export function groupsOf(items: AttentionItem[]): AttentionItem[][] {
  const groups = new Map<string, AttentionItem[]>();
  for (const item of items) {
    const key = `${item.level} ${item.kind}`;
    groups.set(key, [...(groups.get(key) ?? []), item]);
  }
  return [...groups.values()];
}

function Lines({ items, ask }: { items: AttentionItem[]; ask: Ask }) {
  return <ul>{items.map((one) => <Line key={one.id} item={one} ask={ask} />)}</ul>;
}

/** "6 runs, such as gpt". */
function namesOf(items: AttentionItem[]): string {
  const runs = new Set(items.map((one) => one.run ?? "the storage"));
  const [first] = runs;
  return runs.size === 1 ? `${count(items.length)} times in ${first}`
    : `${count(runs.size)} runs, such as ${first}`;
}

function Group({ items, ask }: { items: AttentionItem[]; ask: Ask }) {
  const [first] = items;
  if (!first || items.length <= SAME_OPEN_MAX) return <Lines items={items} ask={ask} />;
  return (
    <details>
      <summary>
        <State state={toneOf(first)}>{kindWords(first.kind)}</State>{" "}
        {namesOf(items)}
        {first.since ? <span className="muted"> · <Time at={first.since} /></span> : null}
      </summary>
      <Lines items={items} ask={ask} />
    </details>
  );
}

const title = (open: AttentionItem[]): string => {
  const bad = open.filter((one) => one.level === "bad").length;
  const levels = [bad && `${count(bad)} urgent`, open.length - bad &&
    `${count(open.length - bad)} to watch`].filter(Boolean);
  return open.length === 0 ? "Nothing new needs attention"
    : `Needs attention: ${levels.join(", ")}`;
};

export function Attention() {
  const mayAct = useMayAct();
  const dialog = useDialogStore();
  // An acknowledged item moves, and a solved one vanishes. The dialog with the answer stays.
  const [asked, setAsked] = useState<{ item: AttentionItem; count: number } | null>(null);
  const ask = (item: AttentionItem) => {
    setAsked((old) => ({ item, count: (old?.count ?? 0) + 1 }));
    dialog.show();
  };
  return (
    <>
      <Block ask={mayAct ? ask : null} />
      {asked ? (
        <ActionDialog key={asked.count} action={acknowledgeOf(asked.item)} store={dialog} />
      ) : null}
    </>
  );
}

function Block({ ask }: { ask: Ask }) {
  const { data: items, error } = useAttention();
  if (!items) {
    return error ? <p className="muted">What needs attention could not be read.</p> : null;
  }
  if (items.length === 0) return null;
  const open = items.filter((one) => !one.acknowledged);
  const done = items.filter((one) => one.acknowledged);
  return (
    <section className={open.length > 0 ? "attention" : "attention calm"}
      aria-label="Needs attention">
      <h2>{title(open)}</h2>
      {groupsOf(open).map((group) => (
        <Group key={group[0]?.id} items={group} ask={ask} />
      ))}
      {done.length > 0 ? (
        <details>
          <summary>{count(done.length)} acknowledged</summary>
          <Lines items={done} ask={ask} />
        </details>
      ) : null}
    </section>
  );
}
