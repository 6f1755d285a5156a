// Command extension is what kube-apiserver calls in a pod: an admission webhook, and the server of
// an API group of its own.
//
//	extension -listen :8443 -cert FILE -key FILE
//
// POST /validate denies what carries the label e2e=denied. GET /apis/x.example.com/v1 is the
// discovery of its group, and GET /apis/x.example.com/v1/greetings says in which pod it runs.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net/http"
	"os"
	"time"
)

func main() {
	listen := flag.String("listen", ":8443", "address")
	cert := flag.String("cert", "", "certificate file")
	key := flag.String("key", "", "key file")
	flag.Parse()
	host, err := os.Hostname()
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /validate", func(w http.ResponseWriter, r *http.Request) { validate(w, r, host) })
	mux.HandleFunc("GET /apis/x.example.com/v1", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]any{"kind": "APIResourceList", "apiVersion": "v1",
			"groupVersion": "x.example.com/v1", "resources": []any{
				map[string]any{"name": "greetings", "singularName": "greeting", "namespaced": false, "kind": "Greeting",
					"verbs": []string{"list"}},
			}})
	})
	mux.HandleFunc("GET /apis/x.example.com/v1/greetings", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]any{"kind": "GreetingList", "apiVersion": "x.example.com/v1", "items": []any{}, "from": host})
	})
	server := &http.Server{Addr: *listen, Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	log.Fatal(server.ListenAndServeTLS(*cert, *key))
}

// review is an AdmissionReview (admission.k8s.io/v1), as far as we look.
type review struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Request    *request  `json:"request,omitempty"`
	Response   *response `json:"response,omitempty"`
}

type request struct {
	UID    string `json:"uid"`
	Object struct {
		Metadata struct {
			Labels map[string]string `json:"labels"`
		} `json:"metadata"`
	} `json:"object"`
}

type response struct {
	UID     string `json:"uid"`
	Allowed bool   `json:"allowed"`
	Status  status `json:"status"`
}

type status struct {
	Message string `json:"message"`
}

func validate(w http.ResponseWriter, r *http.Request, host string) {
	var in review
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<20)).Decode(&in)
	if err != nil || in.Request == nil {
		http.Error(w, fmt.Sprint("no AdmissionReview: ", err), http.StatusBadRequest)
		return
	}
	out := &response{UID: in.Request.UID, Allowed: in.Request.Object.Metadata.Labels["e2e"] != "denied"}
	if !out.Allowed {
		out.Status.Message = "denied in " + host
	}
	answer(w, review{APIVersion: in.APIVersion, Kind: in.Kind, Response: out})
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v) //nolint:errcheck // then the caller has left
}
