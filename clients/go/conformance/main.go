// Command driver executes commands of the conformance suite; see clients/conformance/README.md.
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"runtime"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"tidegate"
	pb "tidegate/inference/v1"
)

type command struct {
	Method              string            `json:"method"`
	Request             json.RawMessage   `json:"request"`
	RequestBase64       string            `json:"request_base64"`
	DeadlineMs          int64             `json:"deadline_ms"`
	Metadata            map[string]string `json:"metadata"`
	CancelAfterMessages *int              `json:"cancel_after_messages"`
	ReattachMs          int64             `json:"reattach_ms"`
	During              *struct {
		AfterMessages int       `json:"after_messages"`
		Commands      []command `json:"commands"`
	} `json:"during"`
}

type failure struct {
	Reason       string            `json:"reason"`
	Domain       string            `json:"domain"`
	Metadata     map[string]string `json:"metadata"`
	RetryAfterMs *float64          `json:"retry_after_ms"`
	Violations   [][2]string       `json:"violations"`
	Quota        [][2]string       `json:"quota"`
}

type answer struct {
	Messages []json.RawMessage `json:"messages"`
	Code     string            `json:"code"`
	Message  string            `json:"message"`
	Error    *failure          `json:"error"`
	During   []answer          `json:"during"`
}

func main() {
	client, err := tidegate.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	out := json.NewEncoder(os.Stdout)
	about := fmt.Sprintf("%s, grpc-go %s", runtime.Version(), grpc.Version)
	out.Encode(map[string]string{"language": "Go", "runtime": about})
	lines := bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			return
		}
		var next command
		if err := json.Unmarshal(line, &next); err != nil {
			log.Fatal(err)
		}
		out.Encode(execute(client, next))
	}
}

func execute(client *tidegate.Client, c command) answer {
	result := answer{Messages: []json.RawMessage{}, Code: "OK"}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(c.DeadlineMs)*time.Millisecond)
	defer cancel()
	for key, value := range c.Metadata {
		if key == "traceparent" {
			ctx = tidegate.WithTraceparent(ctx, value)
		} else {
			ctx = metadata.AppendToOutgoingContext(ctx, key, value)
		}
	}
	var err error
	switch c.Method {
	case "Generate", "Attach":
		err = stream(ctx, cancel, client, c, &result)
	case "Cancel":
		request := new(pb.CancelRequest)
		parse(c, request)
		err = result.add(client.Cancel(ctx, request))
	case "Tokenize":
		request := new(pb.TokenizeRequest)
		parse(c, request)
		err = result.add(client.Tokenize(ctx, request))
	case "Detokenize":
		request := new(pb.DetokenizeRequest)
		parse(c, request)
		err = result.add(client.Detokenize(ctx, request))
	case "ListModels":
		request := new(pb.ListModelsRequest)
		parse(c, request)
		err = result.add(client.ListModels(ctx, request))
	default:
		log.Fatalf("unknown method %q", c.Method)
	}
	result.fail(err)
	return result
}

func stream(ctx context.Context, cancel func(), client *tidegate.Client, c command, result *answer) error {
	recv, err := open(ctx, client, c)
	for err == nil {
		if c.CancelAfterMessages != nil && len(result.Messages) == *c.CancelAfterMessages {
			cancel()
		}
		if c.During != nil && len(result.Messages) == c.During.AfterMessages {
			for _, inner := range c.During.Commands {
				result.During = append(result.During, execute(client, inner))
			}
		}
		var message *pb.GenerateResponse
		message, err = recv()
		if err == nil {
			result.add(message, nil)
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}

// open starts the call, and returns how to receive its events.
func open(ctx context.Context, client *tidegate.Client, c command) (func() (*pb.GenerateResponse, error), error) {
	if c.Method == "Attach" {
		request := new(pb.AttachRequest)
		parse(c, request)
		messages, err := client.Attach(ctx, request)
		if err != nil {
			return nil, err
		}
		return func() (*pb.GenerateResponse, error) {
			message, err := messages.Recv()
			return message.GetEvent(), err
		}, nil
	}
	request := new(pb.GenerateRequest)
	parse(c, request)
	messages, err := client.GenerateThrough(ctx, request, time.Duration(c.ReattachMs)*time.Millisecond)
	if err != nil {
		return nil, err
	}
	return messages.Recv, nil
}

func parse(c command, request proto.Message) {
	var err error
	if c.RequestBase64 != "" {
		var raw []byte
		if raw, err = base64.StdEncoding.DecodeString(c.RequestBase64); err == nil {
			err = proto.Unmarshal(raw, request)
		}
	} else {
		err = protojson.Unmarshal(c.Request, request)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func (a *answer) add(message proto.Message, err error) error {
	if err != nil {
		return err
	}
	text, err := protojson.Marshal(message)
	if err != nil {
		log.Fatal(err)
	}
	a.Messages = append(a.Messages, text)
	return nil
}

func (a *answer) fail(err error) {
	if err == nil {
		return
	}
	var failed *tidegate.Error
	if !errors.As(err, &failed) {
		log.Fatal(err)
	}
	a.Code, a.Message = codeName(failed.Code.String()), failed.Message
	a.Error = &failure{failed.Reason, failed.Domain, failed.Metadata, nil, pairs(failed.Fields), pairs(failed.Quota)}
	if wait, ok := failed.RetryAfter(); ok {
		ms := float64(wait) / float64(time.Millisecond)
		a.Error.RetryAfterMs = &ms
	}
}

// codeName turns Go's InvalidArgument into INVALID_ARGUMENT.
func codeName(name string) string {
	var out strings.Builder
	for i, letter := range name {
		if i > 0 && letter >= 'A' && letter <= 'Z' && name != "OK" {
			out.WriteByte('_')
		}
		out.WriteRune(letter)
	}
	return strings.ToUpper(strings.Replace(out.String(), "Canceled", "Cancelled", 1))
}

func pairs(violations []tidegate.Violation) [][2]string {
	out := [][2]string{}
	for _, each := range violations {
		out = append(out, [2]string{each.Subject, each.Description})
	}
	return out
}
