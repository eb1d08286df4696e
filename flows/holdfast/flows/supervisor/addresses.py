"""Addresses of notifications, as Apprise reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.contracts.errors import SecretError

if TYPE_CHECKING:
    from apprise import Apprise


def check_address(address: str) -> Apprise:
    """Return a sender for an address such as `mailtos://…`.

    Raises `SecretError`, without the address, if Apprise does not know its form.
    """
    # It takes a third of a second to import, and most runs have no targets.
    import apprise

    asset = apprise.AppriseAsset(app_id="Holdfast", app_desc="Holdfast", secure_logging=True)
    sender = apprise.Apprise(asset=asset)
    if not sender.add(address):
        raise SecretError(
            "is not an address of Apprise; expected one such as slack://…, mailtos://… or "
            "jsons://host/path"
        )
    return sender
