// Package tidegate is a client of the Tidegate inference service.
//
// A Client is the generated stub, with two things added: errors of every call are *Error, which carry what the
// server said beside the status, and the connection is kept alive while a stream is silent.
//
// Cancelling a call's context cancels the request on the server; the context's deadline is the request's deadline.
package tidegate

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	pb "tidegate/inference/v1"
)

// Client calls one scheduler. It may be used by any number of goroutines.
type Client struct {
	pb.InferenceServiceClient
	conn *grpc.ClientConn
}

// Dial makes a client of the scheduler at target, such as "localhost:50051". The connection is made by the first
// call. Options must name the transport's security: grpc.WithInsecure() or grpc.WithTransportCredentials.
func Dial(target string, options ...grpc.DialOption) (*Client, error) {
	own := []grpc.DialOption{
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.WithChainUnaryInterceptor(unaryErrors),
		grpc.WithChainStreamInterceptor(streamErrors),
	}
	conn, err := grpc.Dial(target, append(own, options...)...)
	if err != nil {
		return nil, err
	}
	return &Client{InferenceServiceClient: pb.NewInferenceServiceClient(conn), conn: conn}, nil
}

// Close closes the connection. Requests that are running are cancelled.
func (c *Client) Close() error { return c.conn.Close() }

// WithTraceparent has calls under the context continue the W3C trace that traceparent names.
func WithTraceparent(ctx context.Context, traceparent string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "traceparent", traceparent)
}

func unaryErrors(ctx context.Context, method string, request, reply interface{}, conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	return fromStatus(invoke(ctx, method, request, reply, conn, options...))
}

func streamErrors(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string,
	open grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := open(ctx, desc, conn, method, options...)
	if err != nil {
		return nil, fromStatus(err)
	}
	return &errorStream{stream}, nil
}

type errorStream struct{ grpc.ClientStream }

func (s *errorStream) RecvMsg(message interface{}) error {
	return fromStatus(s.ClientStream.RecvMsg(message))
}
