package tidegate

import (
	"context"
	"errors"
	"math/rand"
	"time"

	"google.golang.org/grpc/codes"

	pb "tidegate/inference/v1"
)

const (
	firstPause   = 100 * time.Millisecond
	longestPause = 2 * time.Second
)

// Generation streams one generation, and goes on with it when its scheduler ends and one with its journal comes back.
// It is made by Client.GenerateThrough. One goroutine may call Recv.
type Generation struct {
	client   *Client
	ctx      context.Context
	patience time.Duration
	recv     func() (*pb.GenerateResponse, error)

	requestID string
	received  map[uint32]*pb.Received
	loss      error // what broke the stream that is to go on
	giveUpAt  time.Time
	pause     time.Duration
}

// GenerateThrough is Generate, but that a stream which loses its scheduler goes on where it broke, if a scheduler that
// knows the request comes back within patience. Otherwise the loss is the error, UNAVAILABLE.
func (c *Client) GenerateThrough(ctx context.Context, request *pb.GenerateRequest,
	patience time.Duration) (*Generation, error) {
	stream, err := c.Generate(ctx, request)
	if err != nil {
		return nil, err
	}
	return &Generation{client: c, ctx: ctx, patience: patience, recv: stream.Recv,
		received: map[uint32]*pb.Received{}}, nil
}

// Recv returns the next event; io.EOF at the end, *Error when the generation failed. Admitted comes once.
func (g *Generation) Recv() (*pb.GenerateResponse, error) {
	for {
		message, err := g.recv()
		if err == nil {
			if g.take(message) {
				return message, nil
			}
			continue
		}
		var failed *Error
		if !errors.As(err, &failed) {
			return nil, err
		}
		if err := g.wait(failed); err != nil {
			return nil, err
		}
		g.recv = g.attach()
	}
}

// attach returns how to receive what has not come.
func (g *Generation) attach() func() (*pb.GenerateResponse, error) {
	request := &pb.AttachRequest{RequestId: g.requestID}
	for _, received := range g.received {
		request.Received = append(request.Received, received)
	}
	stream, err := g.client.Attach(g.ctx, request)
	return func() (*pb.GenerateResponse, error) {
		if err != nil {
			return nil, err
		}
		message, err := stream.Recv()
		return message.GetEvent(), err
	}
}

// take counts an event in, and says whether its reader has not seen it: a stream that goes on begins with Admitted again.
func (g *Generation) take(message *pb.GenerateResponse) bool {
	g.loss = nil
	if message == nil {
		return false // an event of a later version's making
	}
	switch event := message.GetEvent().(type) {
	case *pb.GenerateResponse_Admitted:
		isNew := g.requestID == ""
		g.requestID = event.Admitted.RequestId
		return isNew
	case *pb.GenerateResponse_Delta:
		received := g.of(event.Delta.Index)
		if tokens := len(event.Delta.TokenIds); tokens > 0 {
			received.NumTokens += uint32(tokens)
		} else {
			received.NumTokens += uint32(len(event.Delta.Logprobs))
		}
		received.TextBytes += uint64(len(event.Delta.Text))
	case *pb.GenerateResponse_Finished:
		g.of(event.Finished.Index).Finished = true
	}
	return true
}

func (g *Generation) of(index uint32) *pb.Received {
	if g.received[index] == nil {
		g.received[index] = &pb.Received{Index: index}
	}
	return g.received[index]
}

// wait returns nil when Attach is to be tried now, or the error that ends the stream.
func (g *Generation) wait(failed *Error) error {
	switch {
	case g.loss == nil:
		// A scheduler that gives another reason is there.
		isLoss := failed.Code == codes.Unavailable && (failed.Reason == "" || failed.Reason == "ENGINE_LOST")
		if !isLoss || g.requestID == "" || g.patience == 0 {
			return failed
		}
		g.loss, g.giveUpAt, g.pause = failed, time.Now().Add(g.patience), firstPause/2
	case failed.Code == codes.NotFound || failed.Code == codes.Unimplemented:
		return g.loss
	case failed.Code != codes.Unavailable && failed.Code != codes.AlreadyExists:
		return failed // AlreadyExists: it has not yet noticed that the old stream broke
	}
	if g.pause *= 2; g.pause > longestPause {
		g.pause = longestPause
	}
	pause := g.pause/2 + time.Duration(rand.Int63n(int64(g.pause/2)))
	if time.Now().Add(pause).After(g.giveUpAt) {
		return g.loss
	}
	select {
	case <-time.After(pause):
	case <-g.ctx.Done(): // the next call says so
	}
	return nil
}
