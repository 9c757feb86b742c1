"""What the services' telemetry has in common: names, histograms, exporters. No gRPC, nothing else of ours."""
