"""`TieredKVConnector` that begins promotions when a request is scheduled, not when it arrives: for comparisons."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tiered_kv.integrations.vllm.connector import TieredKVConnector


class LateConnector(TieredKVConnector):
    def on_new_request(self, request: Any) -> None:
        OffloadingConnector.on_new_request(self, request)
