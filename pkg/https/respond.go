package https

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/http/httpguts"

	"tunnel.example/tunnel/pkg/tunnel"
)

// RefusalHeader marks a response of the tunnel, as opposed to one of the kubelet. Its value is a
// [tunnel.Code].
const RefusalHeader = "Tunnel-Refusal"

// respond writes a response of our own. text says what was wrong and what to do.
func respond(w http.ResponseWriter, r *http.Request, status int, code, text string) {
	if e, ok := w.(*entry); ok {
		e.refuse(0, text)
	}
	text = "tunnel: " + text
	contentType, body := "text/plain; charset=utf-8", []byte(text+"\n")
	if wantsStatus(r) {
		contentType, body = "application/json", kubeStatus(status, text)
	}
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("X-Content-Type-Options", "nosniff")
	if code != "" {
		h.Set(RefusalHeader, code)
	}
	w.WriteHeader(status)
	w.Write(body)
}

// wantsStatus reports whether the sender of r should get a metav1.Status rather than plain text.
//
// The response to an upgrade reaches kubectl unchanged (apimachinery/pkg/util/proxy, tryUpgrade),
// and kubectl decodes it as a Status, from JSON or from YAML. A text that contains a colon is valid
// YAML, too. It decodes to a Status without a message, and the user reads "error upgrading
// connection: ". Other requests of kube-apiserver's own, such as those for logs, do not accept
// JSON; kube-apiserver puts the text into a Status itself.
func wantsStatus(r *http.Request) bool {
	if httpguts.HeaderValuesContainsToken(r.Header["Connection"], "Upgrade") {
		return true
	}
	for _, accept := range r.Header["Accept"] {
		if strings.Contains(strings.ToLower(accept), "json") {
			return true
		}
	}
	return false
}

// maxStatus is how many bytes kubectl reads of the response to a websocket upgrade
// (gorilla/websocket, Dialer.DialContext). A longer Status is cut off and does not decode.
const maxStatus = 1024

// kubeStatus returns a metav1.Status as JSON, at most maxStatus bytes long.
func kubeStatus(status int, text string) []byte {
	s := struct {
		Kind       string   `json:"kind"`
		APIVersion string   `json:"apiVersion"`
		Metadata   struct{} `json:"metadata"`
		Status     string   `json:"status"`
		Message    string   `json:"message"`
		Reason     string   `json:"reason,omitempty"`
		Code       int      `json:"code"`
	}{Kind: "Status", APIVersion: "v1", Status: "Failure", Message: text, Reason: kubeReason(status), Code: status}
	for {
		var b bytes.Buffer
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		if err := e.Encode(s); err != nil {
			return []byte(fmt.Sprintf("%q", text)) // cannot happen: strings and a number always encode
		}
		over := b.Len() - maxStatus
		if over <= 0 {
			return b.Bytes()
		}
		// JSON encodes one byte as six at most. If too little is cut, the loop runs again.
		keep := max(0, len(text)-max(over/6, 1)-len("…"))
		for keep > 0 && !utf8.RuneStart(text[keep]) {
			keep--
		}
		text = text[:keep]
		s.Message = text + "…"
	}
}

// kubeReason returns the metav1.StatusReason for an HTTP status; "" if there is none.
func kubeReason(status int) string {
	switch status {
	case http.StatusBadRequest:
		return "BadRequest"
	case http.StatusForbidden:
		return "Forbidden"
	case http.StatusMethodNotAllowed:
		return "MethodNotAllowed"
	case http.StatusServiceUnavailable:
		return "ServiceUnavailable"
	case http.StatusGatewayTimeout:
		return "Timeout"
	default:
		return ""
	}
}

// statusOf returns the HTTP status for a conn that was refused with code c.
func statusOf(c tunnel.Code) int {
	switch c {
	case tunnel.Timeout:
		return http.StatusGatewayTimeout
	case tunnel.Overloaded, tunnel.Draining:
		return http.StatusServiceUnavailable
	default:
		return http.StatusBadGateway
	}
}
