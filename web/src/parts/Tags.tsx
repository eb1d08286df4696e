// Tags and notes of runs and checkpoints: how they are shown, and the dialog that changes them.
import {
  Dialog, DialogDescription, DialogDismiss, DialogHeading, useDialogStore,
} from "@ariakit/react";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useState } from "react";
import { changeOf, NOTE_MAX, tagsIn, type Annotated } from "../annotation";
import { AwayError, post } from "../api/client";
import type { RunsSearch } from "../runsSearch";
import { Problem, Time } from "./basics";

type Noted = Annotated & { note_by: string | null; note_at: string | null };

/** The tags of a run. Each lists the runs that have it, with the other filters in `within`. */
export function RunTags({ tags, within }: { tags: string[]; within?: RunsSearch }) {
  if (tags.length === 0) return null;
  return (
    <ul className="tags" aria-label="Tags">
      {tags.map((tag) => (
        <li key={tag}>
          <Link to="/" search={{ ...within, tag }} className="tag" title={`Runs with ${tag}`}>
            {tag}
          </Link>
        </li>
      ))}
    </ul>
  );
}

/** The tags of a checkpoint, by which no list is filtered. */
export function CheckpointTags({ tags }: { tags: string[] }) {
  if (tags.length === 0) return null;
  return (
    <ul className="tags" aria-label="Tags">
      {tags.map((tag) => <li key={tag}><span className="tag">{tag}</span></li>)}
    </ul>
  );
}

/** A note, with who wrote it and when. */
export function Note({ of: { note, note_by, note_at } }: { of: Noted }) {
  if (!note) return null;
  return (
    <div className="note">
      {/* A long note scrolls, so the keyboard must reach it. */}
      <div dir="auto" tabIndex={0} role="group" aria-label="Note" className="text">{note}</div>
      <span className="muted"><bdi>{note_by ?? "unknown"}</bdi>, <Time at={note_at} /></span>
    </div>
  );
}

/** A button that opens a dialog for the tags and the note of `name`. */
export function AnnotateButton({ name, path, of: current }: {
  name: string;
  path: string;
  of: Noted;
}) {
  const dialog = useDialogStore();
  const client = useQueryClient();
  // What the dialog was opened with. Only the difference to it is sent.
  const [before, setBefore] = useState<Noted>(current);
  const [tags, setTags] = useState("");
  const [note, setNote] = useState("");
  const change = changeOf(before, tagsIn(tags), note);
  const mutation = useMutation({
    mutationFn: () => post<Annotated>(`${path}/annotate`, change),
    onSuccess: () => void client.invalidateQueries(),
  });
  const show = () => {
    mutation.reset();
    setBefore(current);
    setTags(current.tags.join(" "));
    setNote(current.note ?? "");
    dialog.show();
  };
  const { error, isPending } = mutation;
  const hasMoved = current.note !== before.note;
  return (
    <>
      <button type="button" onClick={show}>Tags and note</button>
      <Dialog store={dialog} className="dialog" backdrop={<div className="backdrop" />}
        unmountOnHide hideOnEscape={!isPending} hideOnInteractOutside={!isPending}>
        <DialogHeading render={<h2 />}>Tags and note of {name}</DialogHeading>
        {error ? (
          <Problem error={error} title={error instanceof AwayError
            ? "No response; the change may have been applied." : undefined} />
        ) : null}
        {mutation.isSuccess ? (
          <div className="choices">
            <div role="status">
              Saved. {mutation.data.tags.length > 0
                ? `Tags: ${mutation.data.tags.join(", ")}.` : "No tags."}
            </div>
            <DialogDismiss autoFocus>Close</DialogDismiss>
          </div>
        ) : (
          <form className="annotate" onSubmit={(event) => {
            event.preventDefault();
            mutation.mutate();
          }}>
            <label>
              Tags, separated by spaces
              <input type="text" value={tags} autoCapitalize="off" spellCheck={false}
                onChange={(event) => setTags(event.target.value)} />
            </label>
            <label>
              Note
              <textarea rows={5} maxLength={NOTE_MAX} value={note} dir="auto"
                onChange={(event) => setNote(event.target.value)} />
            </label>
            <DialogDescription className="muted">
              The journal records who changed what.
            </DialogDescription>
            {hasMoved ? (
              <p role="status">
                {current.note_by ?? "Someone"} changed the note meanwhile: {current.note ?? "none"}.
                {" "}If you change yours, it replaces that.
              </p>
            ) : null}
            <div className="choices">
              <DialogDismiss disabled={isPending}>Back</DialogDismiss>
              <button type="submit" className="primary" disabled={isPending || !change}>
                {isPending ? "Sending…" : "Save"}
              </button>
            </div>
          </form>
        )}
      </Dialog>
    </>
  );
}
