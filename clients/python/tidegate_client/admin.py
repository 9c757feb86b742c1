"""The operators' client: state, live requests, drain.

Owns the calls of the admin API. Answers are the protocol's own messages, which are typed and say all.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1.admin_pb2_grpc import AdminServiceStub
from tidegate_client.access import Tls, resolve_access
from tidegate_client.channel import open_channel, resolve_address
from tidegate_client.errors import from_rpc_error

_PAGE_SIZE = 1000


class AdminClient:
    """Looks into a scheduler and steers its workers. Never retries.

    address: host:port. Default: TIDEGATE_ADDRESS, or localhost:50051.
    timeout_s: time limit of each call.
    tls, credentials: as for Client.
    token: an admin's token, or the cluster's secret. None: TIDEGATE_TOKEN, or none.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float = 10.0,
        tls: Tls | None = None,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        access = resolve_access(resolve_address(address), tls, token, credentials)
        self._channel = open_channel(address, access.credentials)
        self._metadata = access.metadata
        self._stub = AdminServiceStub(self._channel)
        self._timeout_s = timeout_s

    def state(self, *, verify: bool = False) -> pb.GetStateResponse:
        """Returns a consistent snapshot of workers, queue and blocks.

        verify: also check every invariant; what does not hold is in `violations`.
        """
        answer: pb.GetStateResponse = self._call(self._stub.GetState, pb.GetStateRequest(verify=verify))
        return answer

    def requests(self) -> Iterator[pb.RequestState]:
        """Yields the live requests, in the order in which they came."""
        page_token = ""
        while True:
            request = pb.ListRequestsRequest(page_size=_PAGE_SIZE, page_token=page_token)
            answer: pb.ListRequestsResponse = self._call(self._stub.ListRequests, request)
            yield from answer.requests
            page_token = answer.next_page_token
            if not page_token:
                return

    def explain(self, request_id: str) -> list[pb.CandidateExplanation]:
        """Returns why the candidates of a request do not run, or what became of them.

        Raises NotFoundError if nothing is known of it.
        """
        answer: pb.ExplainRequestResponse = self._call(
            self._stub.ExplainRequest, pb.ExplainRequestRequest(request_id=request_id)
        )
        return list(answer.candidates)

    def watch(self, *, interval_ms: int = 1000, steps: bool = False) -> Iterator[pb.WatchStateResponse]:
        """Yields the state, then what changes of it, until the iteration is closed. WatchedState adds it up.

        interval_ms: between two updates, 100 to 60,000. There is none where nothing changes.
        steps: also the steps of each worker.
        """
        request = pb.WatchStateRequest(interval_ms=interval_ms, steps=steps)
        call = self._stub.WatchState(request, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    def block_map(self, worker_id: str) -> pb.GetBlockMapResponse:
        """Returns what each KV block of a worker holds. Raises NotFoundError if it is not connected."""
        answer: pb.GetBlockMapResponse = self._call(
            self._stub.GetBlockMap, pb.GetBlockMapRequest(worker_id=worker_id)
        )
        return answer

    def latency(self) -> pb.GetLatencyResponse:
        """Returns how long tokens took: over the last minute, and over the last hour by interval."""
        answer: pb.GetLatencyResponse = self._call(self._stub.GetLatency, pb.GetLatencyRequest())
        return answer

    def drain_worker(self, worker_id: str) -> int:
        """Sends a worker nothing new and moves its requests. Returns their number."""
        answer: pb.DrainWorkerResponse = self._call(
            self._stub.DrainWorker, pb.DrainWorkerRequest(worker_id=worker_id)
        )
        return answer.moved_requests

    def reset_prefix_cache(self) -> int:
        """Forgets cached prefixes that no request uses. Returns the number of blocks."""
        answer: pb.ResetPrefixCacheResponse = self._call(
            self._stub.ResetPrefixCache, pb.ResetPrefixCacheRequest()
        )
        return answer.blocks

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
