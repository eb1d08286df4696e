// A dialog that explains an action and asks for confirmation, with an optional field. It stays open
// until the server has answered: a closed dialog would hide whether the action was applied.
import {
  Dialog, DialogDescription, DialogDismiss, DialogHeading, useDialogStore,
} from "@ariakit/react";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { ApiError, AwayError, post } from "../api/client";
import { Problem } from "./basics";

interface Field {
  name: string;
  label: string;
  type: "number" | "text";
  initial: string;
  required?: boolean;
}

export interface Action {
  /** The identity of a button whose label changes, such as pin and unpin. */
  id?: string;
  word: string;
  title: string;
  path: string;
  body?: Record<string, unknown>;
  field?: Field;
  explanation: ReactNode;
  /** What to show after success, instead of the server's message. */
  done?: (answer: Record<string, unknown>) => ReactNode;
  disabled?: string | null;
  /** Whether an operator may force the action while another request is pending. */
  forceable?: boolean;
}

const UNANSWERED = "No response; the action may have been applied.";

const valueOf = (field: Field, text: string): unknown =>
  field.type === "text" ? text : text === "" ? null : Number(text);

/** The dialog of an action. It may belong to another place than the button, which may vanish. */
export function ActionDialog({ action, store }: {
  action: Action;
  store: ReturnType<typeof useDialogStore>;
}) {
  const client = useQueryClient();
  const [text, setText] = useState(action.field?.initial ?? "");
  const mutation = useMutation({
    mutationFn: (force: boolean) => {
      const own = action.field ? { [action.field.name]: valueOf(action.field, text) } : {};
      const all = { ...action.body, ...own, ...(force ? { force } : {}) };
      return post<Record<string, unknown> | undefined>(action.path, all);
    },
    // Not awaited: the answer is shown even if the page's other requests are slow.
    onSuccess: () => void client.invalidateQueries(),
  });
  const field = action.field;
  const answer = mutation.data ?? {};
  const message = typeof answer.message === "string" ? answer.message : "Done.";
  const { error } = mutation;
  const isUnanswered = error instanceof AwayError;
  const conflicts = Boolean(action.forceable) && error instanceof ApiError && error.status === 409;
  return (
    <Dialog store={store} className="dialog" backdrop={<div className="backdrop" />}
      unmountOnHide hideOnEscape={!mutation.isPending}
      hideOnInteractOutside={!mutation.isPending}>
      <DialogHeading render={<h2 />}>{action.title}</DialogHeading>
      <DialogDescription render={<div />}>
        {action.disabled ?? action.explanation}
      </DialogDescription>
      {error ? <Problem error={error} title={isUnanswered ? UNANSWERED : undefined} /> : null}
      {action.disabled ? (
        <div className="choices"><DialogDismiss>Close</DialogDismiss></div>
      ) : mutation.isSuccess ? (
        <div className="choices">
          <div role="status">{action.done?.(answer) ?? message}</div>
          <DialogDismiss autoFocus>Close</DialogDismiss>
        </div>
      ) : (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            mutation.mutate(conflicts);
          }}
        >
          {field ? (
            <p>
              <label>
                {field.label}{" "}
                <input
                  type={field.type}
                  min={field.type === "number" ? 1 : undefined}
                  required={field.required}
                  value={text}
                  onChange={(event) => setText(event.target.value)}
                />
              </label>
            </p>
          ) : null}
          <div className="choices">
            <DialogDismiss disabled={mutation.isPending}>Back</DialogDismiss>
            <button type="submit" className="primary" disabled={mutation.isPending}>
              {mutation.isPending ? "Sending…"
                : conflicts ? `${action.word} anyway` : action.word}
            </button>
          </div>
        </form>
      )}
    </Dialog>
  );
}

/** A button that asks for confirmation, performs the action, and shows the server's message. */
export function ActionButton({ action: current }: { action: Action }) {
  const dialog = useDialogStore();
  // The dialog keeps its action even if the button's action changes meanwhile.
  const [asked, setAsked] = useState({ action: current, count: 0 });
  const show = () => {
    setAsked(({ count }) => ({ action: current, count: count + 1 }));
    dialog.show();
  };
  return (
    <>
      <button
        type="button"
        onClick={show}
        // It keeps the focus, and says why it is disabled when it is pressed.
        aria-disabled={current.disabled ? true : undefined}
        title={current.disabled ?? undefined}
      >
        {current.word}
      </button>
      <ActionDialog key={asked.count} action={asked.action} store={dialog} />
    </>
  );
}
