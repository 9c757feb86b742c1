package tidegate

import (
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Violation says what is wrong with one field of a request, or which quota is used up.
type Violation struct {
	Subject     string // a field such as "sampling.top_p", or what the quota belongs to
	Description string // for people, with the numbers
}

// Error is how a call failed. Find it with errors.As; status.FromError works on it too.
type Error struct {
	Code     codes.Code
	Message  string
	Reason   string            // a constant such as "QUEUE_FULL"; empty if the server gave none
	Domain   string            // whose reason it is: "tidegate.dev"
	Metadata map[string]string // the numbers behind the reason
	Fields   []Violation       // what is wrong with the request
	Quota    []Violation       // which limits were reached

	retryAfter *time.Duration
	status     *status.Status
}

// RetryAfter is how long the server asks to wait before the request is sent again, if it said so.
func (e *Error) RetryAfter() (time.Duration, bool) {
	if e.retryAfter == nil {
		return 0, false
	}
	return *e.retryAfter, true
}

// Error describes the error for people.
func (e *Error) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("%s (%s): %s", e.Code, e.Reason, e.Message)
}

// GRPCStatus lets status.FromError find the status.
func (e *Error) GRPCStatus() *status.Status { return e.status }

// fromStatus turns a status error into *Error, and leaves nil, io.EOF and others alone.
func fromStatus(err error) error {
	if err == nil {
		return nil
	}
	failed, ok := status.FromError(err)
	if !ok {
		return err
	}
	decoded := &Error{Code: failed.Code(), Message: failed.Message(), status: failed}
	for _, detail := range failed.Details() { // kinds that are not known here come as errors
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			decoded.Reason, decoded.Domain, decoded.Metadata = detail.Reason, detail.Domain, detail.Metadata
		case *errdetails.RetryInfo:
			delay := time.Duration(detail.RetryDelay.GetSeconds())*time.Second +
				time.Duration(detail.RetryDelay.GetNanos())
			decoded.retryAfter = &delay
		case *errdetails.BadRequest:
			for _, field := range detail.FieldViolations {
				decoded.Fields = append(decoded.Fields, Violation{field.Field, field.Description})
			}
		case *errdetails.QuotaFailure:
			for _, limit := range detail.Violations {
				decoded.Quota = append(decoded.Quota, Violation{limit.Subject, limit.Description})
			}
		}
	}
	return decoded
}
