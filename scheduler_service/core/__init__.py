"""The scheduler's pure core: no gRPC, asyncio, torch, OpenTelemetry, logging or clock."""
