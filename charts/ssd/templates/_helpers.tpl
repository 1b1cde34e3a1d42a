{{/* Name of the operator's objects. */}}
{{- define "ssd.name" -}}
{{- printf "%s-operator" (.Release.Name | trunc 54 | trimSuffix "-") -}}
{{- end -}}

{{/* Name of objects outside the release's namespace. It contains the namespace, because releases in two namespaces may have one name. */}}
{{- define "ssd.globalName" -}}
{{- printf "%s.%s" (include "ssd.name" .) .Release.Namespace -}}
{{- end -}}

{{- define "ssd.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "ssd.name" .) -}}
{{- end -}}

{{/* Labels that never change: for selectors, and for the engines' NetworkPolicies, which admit the operator by them. */}}
{{- define "ssd.selector" -}}
app.kubernetes.io/name: ssd-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "ssd.labels" -}}
{{ include "ssd.selector" . }}
app.kubernetes.io/part-of: ssd
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of the pods of helm test and helm uninstall. No Service or policy of the operator selects them. */}}
{{- define "ssd.hookLabels" -}}
app.kubernetes.io/name: ssd-{{ .hook }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/part-of: ssd
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{/* An image: a dict of root and image {repository, tag, digest}. */}}
{{- define "ssd.image" -}}
{{- $name := .image.repository -}}
{{- if not (contains "/" $name) -}}{{- $name = printf "%s/%s" .root.Values.imageRegistry $name -}}{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* "true" if an optional object is wanted: a dict of root, wanted (true, false, null) and api. */}}
{{- define "ssd.optional" -}}
{{- if kindIs "invalid" .wanted -}}
{{- if .root.Capabilities.APIVersions.Has .api -}}true{{- end -}}
{{- else if .wanted -}}true{{- end -}}
{{- end -}}

{{/* Namespaces that are watched, as a JSON list; [""] is the whole cluster. */}}
{{- define "ssd.scope" -}}
{{- if .Values.operator.watchAllNamespaces -}}
{{- toJson (list "") -}}
{{- else -}}
{{- toJson (.Values.operator.watchNamespaces | default (list .Release.Namespace)) -}}
{{- end -}}
{{- end -}}

{{/* "true" if this release needs rights on the cluster anyway. Only then it can look up objects there; without rights a lookup fails. */}}
{{- define "ssd.sees" -}}
{{- if or .Values.crds.install .Values.rbac.aggregate .Values.operator.watchAllNamespaces -}}true{{- end -}}
{{- end -}}

{{/* Owner "namespace/release" of the live CRD of SSDDeployments, which also has the other one, "-" if Helm did not install it; empty if it is this release's or absent. */}}
{{- define "ssd.crdOwner" -}}
{{- $live := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "ssddeployments.ssd.dev" -}}
{{- if $live -}}
{{- $notes := $live.metadata.annotations | default dict -}}
{{- $release := index $notes "meta.helm.sh/release-name" | default "" -}}
{{- $namespace := index $notes "meta.helm.sh/release-namespace" | default "" -}}
{{- if not $release -}}-
{{- else if or (ne $release .Release.Name) (ne $namespace .Release.Namespace) -}}{{ $namespace }}/{{ $release }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What all pods have: where images come from, where they run, and as which user. */}}
{{- define "ssd.pod" -}}
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 0 }}
{{- end }}
{{- with .Values.operator.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.tolerations }}
tolerations: {{- toYaml . | nindent 0 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "ssd.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The pod spec of a hook: a dict of root, account, args. It runs a command of the operator's image. */}}
{{- define "ssd.hookPod" -}}
serviceAccountName: {{ .account | quote }}
restartPolicy: Never
{{ include "ssd.pod" .root }}
containers:
- name: run
  image: {{ include "ssd.image" (dict "root" .root "image" .root.Values.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -m, ssd_operator.runtime.installation]
  args: {{- toYaml .args | nindent 2 }}
  resources: {{- toYaml .root.Values.operator.resources | nindent 4 }}
  securityContext: {{- include "ssd.containerSecurity" . | nindent 4 }}
  volumeMounts:
  - {name: tmp, mountPath: /tmp}
volumes:
- {name: tmp, emptyDir: {}}
{{- end -}}

{{/* Rights on resources for hooks: a dict of root, name, hook, annotations (without them, the objects are no hooks), verbs, namespaces ([""] is the cluster). */}}
{{- define "ssd.hookRights" -}}
{{- $ := . -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "ssd.hookLabels" . | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- range $namespace := .namespaces }}
{{- $prefix := ternary "" "Cluster" (ne $namespace "") }}
{{- range $kind := list "Role" "RoleBinding" }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $prefix }}{{ $kind }}
metadata:
  name: {{ $.name }}.{{ $.root.Release.Namespace }}
  {{- with $namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels: {{- include "ssd.hookLabels" $ | nindent 4 }}
  {{- with $.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- if eq $kind "Role" }}
rules:
- {apiGroups: [ssd.dev], resources: [ssddeployments, ssddraftpools], verbs: {{ toJson $.verbs }}}
{{- else }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: {{ $prefix }}Role, name: {{ $.name }}.{{ $.root.Release.Namespace }}}
subjects:
- {kind: ServiceAccount, name: {{ $.name }}, namespace: {{ $.root.Release.Namespace | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
