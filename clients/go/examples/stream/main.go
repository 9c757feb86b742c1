// Command stream streams one generation, then shows a cancel, a deadline and an error with its details.
//
//	stream [target] [prompt]
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"tidegate"
	pb "tidegate/inference/v1"
)

// In a program that traces, this comes from its current span.
const traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

func main() {
	target, prompt := "localhost:50051", "Once upon a time"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	if len(os.Args) > 2 {
		prompt = os.Args[2]
	}
	client, err := tidegate.Dial(target, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	if err := stream(client, prompt); err != nil {
		log.Fatal(err)
	}
	if err := cancel(client, prompt); err != nil {
		log.Fatal(err)
	}
	deadline(client, prompt)
	refused(client, prompt)
}

// stream prints text as it comes. The deadline is a minute; the server's spans join the caller's trace.
func stream(client *tidegate.Client, prompt string) error {
	ctx, done := context.WithTimeout(context.Background(), time.Minute)
	defer done()
	answer, err := client.Generate(tidegate.WithTraceparent(ctx, traceparent), request(prompt, 40))
	if err != nil {
		return err
	}
	for {
		message, err := answer.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		switch event := message.Event.(type) {
		case *pb.GenerateResponse_Delta:
			fmt.Print(event.Delta.Text)
		case *pb.GenerateResponse_Finished:
			fmt.Printf("\n[%s, %d tokens]\n", event.Finished.Reason, event.Finished.Usage.OutputTokens)
		}
	}
}

// cancel leaves after the first tokens: ending the context frees what the request holds on the server.
func cancel(client *tidegate.Client, prompt string) error {
	ctx, done := context.WithCancel(context.Background())
	answer, err := client.Generate(ctx, request(prompt, 400))
	for err == nil {
		var message *pb.GenerateResponse
		message, err = answer.Recv()
		if message.GetDelta() != nil {
			done()
		}
	}
	done()
	var failed *tidegate.Error
	if errors.As(err, &failed) {
		fmt.Printf("[cancelled: %s]\n", failed.Code)
		return nil
	}
	return err
}

// deadline gives the request less time than it needs.
func deadline(client *tidegate.Client, prompt string) {
	ctx, done := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer done()
	answer, err := client.Generate(ctx, request(prompt, 400))
	for err == nil {
		_, err = answer.Recv()
	}
	fmt.Printf("[deadline: %v]\n", err)
}

// refused shows what an error carries.
func refused(client *tidegate.Client, prompt string) {
	bad := request(prompt, 40)
	bad.Sampling = &pb.SamplingParams{TopP: proto.Float32(0)}
	answer, err := client.Generate(context.Background(), bad)
	if err == nil {
		_, err = answer.Recv()
	}
	var failed *tidegate.Error
	if errors.As(err, &failed) {
		fmt.Printf("[refused: %s %s %v]\n", failed.Code, failed.Reason, failed.Fields)
		if wait, ok := failed.RetryAfter(); ok {
			fmt.Printf("[try again in %s]\n", wait)
		}
	}
}

func request(prompt string, maxTokens uint32) *pb.GenerateRequest {
	return &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: prompt},
		Sampling: &pb.SamplingParams{Temperature: proto.Float32(0)},
		Stopping: &pb.StoppingParams{MaxTokens: &maxTokens, IgnoreEos: proto.Bool(true)},
	}
}
