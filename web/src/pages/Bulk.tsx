// One order for several runs: what it costs each of them, and what each of them answers.
import {
  Dialog, DialogDescription, DialogDismiss, DialogHeading, useDialogStore,
} from "@ariakit/react";
import { useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { AwayError, post } from "../api/client";
import { useSeveralRuns } from "../api/queries";
import type { Run } from "../api/types";
import { Problem } from "../parts/basics";
import type { Action } from "../parts/Confirm";
import { newestOrder, OrderState } from "../parts/Orders";
import { useSelection } from "../parts/Selection";
import { count } from "../format";
import { actionsOf } from "./run/actions";

const runsOf = (many: number): string => `${count(many)} run${many === 1 ? "" : "s"}`;

export const WORDS = ["Stop", "Pause", "Resume", "Cancel"] as const;
export type Word = (typeof WORDS)[number];

/** The run's action with this word, or why it has none. */
export function offerOf(run: Run, word: Word): Action | string {
  const offered = actionsOf(run).find((one) => one.word === word);
  const refused = offered?.disabled ?? run.refusals[word.toLowerCase()];
  if (refused) return refused;
  if (offered) return offered;
  return word === "Resume" ? "The run is not paused."
    : word === "Pause" ? "The run is paused already." : "The run is being cancelled already.";
}

type Answer =
  | { state: "sending" }
  | { state: "done"; message: string; after: number }
  | { state: "failed"; error: unknown };

function Row({ name, offer, error, answer }: {
  name: string;
  offer: Action | string | undefined;
  error: unknown;
  answer: Answer | undefined;
}) {
  return (
    <li>
      <strong className="breaks">{name}</strong>
      {answer?.state === "done" ? (
        <div role="status">{answer.message}<OrderState name={name} after={answer.after} /></div>
      ) : answer?.state === "failed" ? <Problem error={answer.error} />
        : answer?.state === "sending" ? <p role="status">Sending…</p>
          : error ? <Problem error={error} />
            : offer === undefined ? <p className="loading">Asking for its price…</p>
              : typeof offer === "string" ? <p className="muted">Left out: {offer}</p>
                : offer.explanation}
    </li>
  );
}

/** A run gets the order once. Only a run whose answer did not arrive may be asked again. */
const isOpen = (answer: Answer | undefined): boolean =>
  answer === undefined || (answer.state === "failed" && answer.error instanceof AwayError);

function BulkDialog({ word, runs, store }: {
  word: Word;
  runs: [string, string][];
  store: ReturnType<typeof useDialogStore>;
}) {
  const client = useQueryClient();
  const [answers, setAnswers] = useState<Record<string, Answer>>({});
  const [isSending, setSending] = useState(false);
  const put = (uid: string, answer: Answer) => setAnswers((old) => ({ ...old, [uid]: answer }));
  const known = useSeveralRuns(runs.map(([, name]) => name));
  const rows = runs.map(([uid, name], index) => {
    const { data: run, error } = known[index] ?? {};
    return { uid, name, error, run, offer: run && offerOf(run, word) };
  });
  const offers = rows.flatMap(({ uid, run, offer }): [string, Action, number][] =>
    run && typeof offer === "object" && isOpen(answers[uid])
      ? [[uid, offer, newestOrder(run)]] : []);
  const send = async () => {
    setSending(true);
    // One after the other, so that the answers have an order and a slow server is not flooded.
    for (const [uid, action, after] of offers) {
      put(uid, { state: "sending" });
      try {
        const done = await post<{ message?: string }>(action.path, action.body);
        put(uid, { state: "done", message: done.message ?? "Done.", after });
      } catch (error) {
        put(uid, { state: "failed", error });
      }
    }
    setSending(false);
    void client.invalidateQueries();
  };
  const isAgain = Object.keys(answers).length > 0;
  return (
    <Dialog store={store} className="dialog wide" backdrop={<div className="backdrop" />}
      unmountOnHide hideOnEscape={!isSending} hideOnInteractOutside={!isSending}>
      <DialogHeading render={<h2 />}>{word} {runsOf(runs.length)}</DialogHeading>
      <DialogDescription render={<p />}>
        {isAgain ? "Each run answered separately." : "Each run gets the order separately."}
      </DialogDescription>
      <ul className="prices" tabIndex={0} aria-label="Runs and what it costs them">
        {rows.map(({ uid, name, offer, error }) => (
          <Row key={uid} name={name} offer={offer} error={error} answer={answers[uid]} />
        ))}
      </ul>
      <div className="choices">
        <DialogDismiss disabled={isSending}>{isAgain ? "Close" : "Back"}</DialogDismiss>
        {isAgain && offers.length === 0 ? null : (
          <button type="button" className="primary" disabled={isSending || offers.length === 0}
            onClick={() => void send()}>
            {isSending ? "Sending…"
              : `${word} ${runsOf(offers.length)}${isAgain ? " again" : ""}`}
          </button>
        )}
      </div>
    </Dialog>
  );
}

/** The bar with the actions on the selected runs. */
export function Bulk() {
  const { selected, clear } = useSelection();
  const store = useDialogStore();
  // The dialog keeps its runs, also if the list changes below it.
  const [asked, setAsked] = useState<{ word: Word; runs: [string, string][] } | null>(null);
  const show = (word: Word) => {
    setAsked({ word, runs: [...selected] });
    store.show();
  };
  return (
    <div className="bulk" role="toolbar" aria-label="Selected runs">
      <span role="status">{count(selected.size)} selected</span>
      {WORDS.map((word) => (
        <button key={word} type="button" onClick={() => show(word)}>{word}…</button>
      ))}
      <button type="button" className="plain" onClick={clear}>Clear</button>
      {asked ? <BulkDialog {...asked} store={store} /> : null}
    </div>
  );
}
