"""ApiVersions (18)."""

from __future__ import annotations

import re

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.handlers.api import Call, api
from asyncproducer.testing.messages import Response

__all__ = ["API_VERSIONS", "api_versions", "unsupported_api_versions"]

API_VERSIONS = 18

#: The highest `transaction.version` there is. Other features go as far as they are used.
_TRANSACTION_VERSION = 2

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


@api(API_VERSIONS, "api_versions", 0, 4)
def api_versions(call: Call) -> Response:
    """What this broker speaks. From v3 on the client's name must be well formed (KIP-511)."""
    error = ErrorCode.NONE
    if call.version >= 3 and not all(
        _SOFTWARE.fullmatch(text)
        for text in (call.body.client_software_name, call.body.client_software_version)
    ):
        error = ErrorCode.INVALID_REQUEST
    if (injected := call.injected()) is not None:
        error = injected.code
    if error == ErrorCode.UNSUPPORTED_VERSION:
        return unsupported_api_versions(call.versions[API_VERSIONS])
    if error:
        return {"error_code": error, "api_keys": []}
    return {
        "error_code": ErrorCode.NONE,
        "api_keys": [_version_range(key, found) for key, found in sorted(call.versions.items())],
        "supported_features": [
            {"name": name, "min_version": 0, "max_version": max(level, _TRANSACTION_VERSION)}
            for name, level in call.state.features.items()
            if call.version >= 4  # KIP-1022: clients before do not know that it may be 0
        ],
        "finalized_features_epoch": call.state.features_epoch,
        "finalized_features": [
            {"name": name, "max_version_level": level, "min_version_level": level}
            for name, level in call.state.features.items()
            if level > 0
        ],
    }


def unsupported_api_versions(supported: tuple[int, int]) -> Response:
    """The answer, always in v0, to an ApiVersions request newer than we know (KIP-511)."""
    return {
        "error_code": ErrorCode.UNSUPPORTED_VERSION,
        "api_keys": [_version_range(API_VERSIONS, supported)],
    }


def _version_range(key: int, versions: tuple[int, int]) -> Response:
    return {"api_key": key, "min_version": versions[0], "max_version": versions[1]}
